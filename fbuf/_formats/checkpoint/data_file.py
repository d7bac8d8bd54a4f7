"""A data file: blocks in the safetensors format, written as they come and read one at a time.

Room for the header is left at the front, blocks follow, and the header, padded with blanks, is written last. A killed save
therefore leaves an invalid safetensors file. Files are read with `pread`: a mapping of a file that becomes shorter would end
the process. Memory: one block.
"""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from fbuf._formats.checkpoint.dtypes import stored
from fbuf._formats.checkpoint.filesystem import SAVE_ELSEWHERE, Disk, close_read, closing, read_into, retried, write_all
from fbuf._formats.checkpoint.layout import Layout
from fbuf._formats.checkpoint.manifest import FileEntry
from fbuf._host.io.checksum import crc32
from fbuf._host.io.file import annotate_os_error
from fbuf._host.types import Array, StoreCorrupted

MAX_HEADER = 100_000_000
"""The largest header that safetensors reads, in bytes."""
_STEP_BYTES = 1 << 20
_WRITE_BYTES, _WRITE_BLOCKS = 1 << 20, 256
"""Bytes and number of blocks that are written in one call; the disk then works while others are prepared."""


def max_header_bytes(name: str, layout: Layout, which: Array) -> int:
    """Return an upper bound of the header bytes for some blocks."""
    number = len(which)
    if not number:
        return 0
    kind, shape = stored(layout.dtype, layout.shape)  # the largest shape and offsets
    each = len(_dumps({f"{name}#": {"dtype": kind, "shape": shape, "data_offsets": [1 << 48, 1 << 48]}}))
    if layout.keys is None:
        return number * (each + len(str(layout.num_blocks)))
    return number * each + len(_dumps([layout.keys[i] for i in which.tolist()]))


class DataFile:
    """A new data file.

    Args:
      header: Bytes to reserve for the header's blocks (`max_header_bytes`).
      save: The id of the save, which makes the header unique.
      sync: Whether `wait` syncs.
    Raises:
      OSError: it cannot be created, or exists.
    """

    def __init__(self, disk: Disk, path: str, header: int, save: str, sync: bool) -> None:
        self._disk, self.path, self._save, self._sync = disk, path, save, sync
        metadata = _dumps({"format": "fbuf data", "version": "1", "save": save})
        self._tensors = [b'"__metadata__":' + metadata]  # of the header's JSON
        self._data_start = -(-(10 + header + len(self._tensors[0])) // 8) * 8
        if self._data_start > MAX_HEADER:
            raise ValueError(f"{path} has a header of {self._data_start} bytes > {MAX_HEADER}. Use larger blocks.")
        with annotate_os_error("make", path, SAVE_ELSEWHERE):
            self._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._at = self._written = self._data_start
        self._pending: list[memoryview] = []

    def add(self, name: str, layout: Layout, index: int, data: memoryview) -> int:
        """Write a block, which must not change until `finish`; return its offset."""
        start = self._at
        if start + data.nbytes - self._written > _WRITE_BYTES or len(self._pending) == _WRITE_BLOCKS:
            self._flush()
        self._pending.append(data)
        self._at += data.nbytes
        kind, shape = stored(layout.dtype, layout.block_shape(index))
        first, last = start - self._data_start, self._at - self._data_start
        block = json.dumps(f"{name}#{layout.block_key(index)}")
        self._tensors.append(  # an encoder for each takes a tenth of a save
            f'{block}:{{"dtype":"{kind}","shape":[{",".join(map(str, shape))}],"data_offsets":[{first},{last}]}}'.encode()
        )
        return start

    def _flush(self) -> None:
        """Write the pending blocks."""
        write_all(self._disk, self._fd, self.path, self._pending, self._written)
        if self._sync:
            self._disk.start_writeback(self._fd, self._written, self._at - self._written)
        self._pending, self._written = [], self._at

    def finish(self) -> FileEntry:
        """Write the header. `wait` must follow."""
        self._flush()
        text = (b"{" + b",".join(self._tensors) + b"}").ljust(self._data_start - 8)
        assert len(text) == self._data_start - 8, "max_header_bytes is an upper bound"
        head = (self._data_start - 8).to_bytes(8, "little") + text
        write_all(self._disk, self._fd, self.path, [memoryview(head)], 0)
        return FileEntry(os.path.basename(self.path), self._at, self._data_start, crc32(head), self._save, self._sync)

    def wait(self) -> None:
        """Sync if requested, and close the file. From any thread."""
        fd, self._fd = self._fd, -1
        with closing(self._disk, fd, self.path):
            if self._sync:
                with annotate_os_error("sync", self.path, SAVE_ELSEWHERE):
                    self._disk.fsync(fd)

    def close(self) -> None:
        """Close the descriptor of a file that is given up; twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_read(self._disk, fd)


class OpenFile:
    """A data file open for reading, whose size and header match the manifest.

    Raises:
      StoreCorrupted: they do not, or the file is missing or not a plain file.
      OSError: it cannot be opened or read.
    """

    def __init__(self, disk: Disk, folder: str, entry: FileEntry) -> None:
        self._disk, self.fd = disk, -1
        self.path = os.path.join(folder, entry.name)
        self.fd, size = open_plain(disk, self.path)
        try:
            if size != entry.size:
                raise StoreCorrupted(f"{self.path} has {size} bytes; expected {entry.size}: cut short or replaced")
            crc = self.crc(0, entry.header)
            if crc != entry.crc:
                crc = self.crc(0, entry.header)  # read again: only lasting damage counts
            if crc != entry.crc:
                raise StoreCorrupted(
                    f"{self.path} has a header (bytes 0 to {entry.header}) with crc32 {crc:#010x}; expected {entry.crc:#010x}: "
                    f"damaged, or a file of another save"
                )
        except BaseException:
            self.close()
            raise

    def read(self, out: memoryview, at: int) -> None:
        """Fill `out`. Raises StoreCorrupted: the file is too short; ReadError: the disk fails; ValueError: it is closed."""
        if self.fd < 0:
            raise ValueError(f"fbuf.load: {self.path} is closed; expected it open. Read before close(), or load again.")
        got = read_into(self._disk, self.fd, self.path, out, at)
        if got != out.nbytes:
            raise StoreCorrupted(f"{self.path} ends at byte {at + got}; expected {at + out.nbytes}: it was cut short")

    def crc(self, at: int, size: int, out: memoryview | None = None) -> int:
        """Return the crc32 of some bytes."""
        crc, buffer = 0, memoryview(bytearray(min(size, _STEP_BYTES))) if out is None else out
        while size:
            part = buffer[: min(size, len(buffer))]
            self.read(part, at)
            crc, at, size = crc32(part, crc), at + part.nbytes, size - part.nbytes
        return crc

    def close(self) -> None:
        """Close the descriptor; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_read(self._disk, fd)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at exit modules are emptied; the system closes the file
            pass


def open_plain(disk: Disk, path: str) -> tuple[int, int]:
    """Open a plain file; return descriptor and size. Raises StoreCorrupted: missing, a link, or not plain; and OSError."""
    try:
        fd = retried(lambda: disk.open(path, os.O_RDONLY))
    except FileNotFoundError:
        raise StoreCorrupted(f"{path} is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreCorrupted(f"{path} is a link; expected a plain file") from None
        with annotate_os_error("open", path):
            raise error
    try:
        with annotate_os_error("look at", path):
            return fd, retried(lambda: disk.size(fd))
    except OSError as error:
        close_read(disk, fd)
        if error.errno == errno.EINVAL:
            raise StoreCorrupted(f"{path} is not a plain file") from None
        raise


def read_plain(disk: Disk, path: str, most: int) -> bytes:
    """Return the bytes of a plain file. Raises StoreCorrupted: it has more than `most`, or as `open_plain`; OSError."""
    fd, size = open_plain(disk, path)
    try:
        if size > most:
            raise StoreCorrupted(f"{path} has {size} bytes; expected at most {most}")
        text = bytearray(size)
        return bytes(text[: read_into(disk, fd, path, memoryview(text), 0)])
    finally:
        close_read(disk, fd)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
