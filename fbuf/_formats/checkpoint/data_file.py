"""A data file: blocks in the safetensors format, written as they come and read one at a time.

The safetensors library wants all tensors in memory to write a file, and has no checksums; its reader maps the file, and a
mapping of a file that becomes shorter ends the process (SIGBUS). Here room for the header is left at the front, blocks follow
as they are made, and the header, padded with blanks as the format allows, is written last: what a killed save leaves is no
safetensors file. Memory: one block.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.dtypes import stored
from fbuf._formats.checkpoint.filesystem import INSTEAD, Disk, read_into, write_all
from fbuf._formats.checkpoint.layout import Layout
from fbuf._formats.checkpoint.manifest import FileEntry
from fbuf._host.io.file import annotate_os_error
from fbuf._host.types import Array, StoreCorrupted, flat

MOST_HEADER = 100_000_000
"""Bytes of a header that safetensors reads."""
_PIECE = 1 << 20
_BEHIND = 8 << 20
"""Bytes that are written before the disk begins with them: it works while blocks are made."""


def tensor_name(name: str, layout: Layout, index: int) -> str:
    """What a block is called in its file."""
    return f"{name}#{layout.key(index)}"


def header_room(name: str, layout: Layout, which: Array) -> int:
    """Bytes that some blocks may take in the header, and more."""
    number = len(which)
    if not number:
        return 0
    kind, shape = stored(layout.dtype, layout.shape)  # no block has more rows
    each = len(_dumps({f"{name}#": {"dtype": kind, "shape": shape, "data_offsets": [1 << 48, 1 << 48]}}))
    if layout.keys is None:
        return number * (each + len(str(layout.count)))
    return number * each + len(_dumps([layout.keys[i] for i in which.tolist()]))


class DataFile:
    """A new data file.

    Args:
      header: Bytes to leave for what it says of blocks (`header_room`).
      save: The id of the save, which makes its header like no other.
      sync: The disk is waited for at the end.
    Raises:
      OSError: it cannot be made; also if it is there.
    """

    def __init__(self, disk: Disk, path: str, header: int, save: str, sync: bool) -> None:
        self._disk, self.path, self._save, self._sync = disk, path, save, sync
        self._infos: dict[str, Any] = {"__metadata__": {"format": "fbuf data", "version": "1", "save": save}}
        self._data = -(-(8 + header + len(_dumps(self._infos))) // 8) * 8
        if self._data > MOST_HEADER:
            raise ValueError(
                f"fbuf.save: the header of {path} would have {self._data} bytes; expected at most {MOST_HEADER}. Save larger "
                f"blocks."
            )
        with annotate_os_error("make", path, INSTEAD):
            self._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._at = self._begun = self._data

    def add(self, name: str, layout: Layout, index: int, end: int, data: memoryview) -> list[int]:
        """Writes blocks that lie one after another, and says at which byte of the file each begins."""
        start = self._at
        write_all(self._disk, self._fd, self.path, data, start)
        self._at += data.nbytes
        if self._sync and self._at - self._begun >= _BEHIND:
            self._disk.begin(self._fd, self._begun, self._at - self._begun)
            self._begun = self._at
        starts = [start, *(start + np.cumsum(layout.sizes[index:end])).tolist()]
        for i, (at, stop) in enumerate(zip(starts, starts[1:], strict=False), index):
            self._infos[tensor_name(name, layout, i)] = _info(layout, i, at - self._data, stop - self._data)
        return starts[:-1]

    def finish(self) -> FileEntry:
        """Writes the header; `wait` is what is left to do."""
        text = _dumps(self._infos).ljust(self._data - 8)
        if len(text) != self._data - 8:
            raise RuntimeError(
                f"fbuf.save: {self.path} has room for a header of {self._data - 8} bytes, not {len(text)}."
            )
        head = (self._data - 8).to_bytes(8, "little") + text
        write_all(self._disk, self._fd, self.path, head, 0)
        return FileEntry(os.path.basename(self.path), self._at, self._data, zlib.crc32(head), self._save, self._sync)

    def wait(self) -> None:
        """Waits for the disk, if it is to be waited for, and closes the file. From any thread."""
        if self._sync:
            with annotate_os_error("sync", self.path, INSTEAD):
                self._disk.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Gives the descriptor back; twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)


class OpenFile:
    """A data file that a manifest names, open for reading, whose size and header are what the manifest says.

    Raises:
      StoreCorrupted: they are not, or it is not there, or is no plain file.
      OSError: it may not be opened.
    """

    def __init__(self, disk: Disk, folder: str, entry: FileEntry) -> None:
        self._disk, self.fd = disk, -1
        self.path = os.path.join(folder, entry.name)
        self.fd, size = open_plain(disk, self.path)
        try:
            if size != entry.size:
                raise StoreCorrupted(
                    f"{self.path} has {size} bytes; expected {entry.size}: it was cut short or replaced"
                )
            crc = self.crc(0, entry.header)
            if crc != entry.crc:
                raise StoreCorrupted(
                    f"{self.path} has a header (bytes 0 to {entry.header}) with crc32 {crc:#010x}; expected {entry.crc:#010x}: "
                    f"it was damaged, or is a file of another save"
                )
        except BaseException:
            self.close()
            raise

    def read(self, out: memoryview, at: int) -> None:
        """Fills `out`. Raises StoreCorrupted: the file is shorter, or a part of it cannot be read; ValueError: it is closed."""
        if self.fd < 0:
            raise ValueError(f"fbuf.load: {self.path} is closed; expected it open. Read before close(), or load again.")
        try:
            got = read_into(self._disk, self.fd, self.path, out, at)
        except OSError as error:
            raise StoreCorrupted(f"{self.path} cannot be read at byte {at}: {error}") from error
        if got != out.nbytes:
            raise StoreCorrupted(f"{self.path} ends at byte {at + got}; expected {at + out.nbytes}: it was cut short")

    def crc(self, at: int, size: int, out: memoryview | None = None) -> int:
        """crc32 of some bytes, a piece at a time."""
        crc, buffer = 0, memoryview(bytearray(min(size, _PIECE))) if out is None else out
        while size:
            piece = buffer[: min(size, len(buffer))]
            self.read(piece, at)
            crc, at, size = zlib.crc32(piece, crc), at + piece.nbytes, size - piece.nbytes
        return crc

    def holds(self, data: memoryview, at: int, buffer: memoryview) -> bool:
        """Whether these very bytes lie there."""
        for start in range(0, data.nbytes, buffer.nbytes):
            part = data[start : start + buffer.nbytes]
            try:
                self.read(buffer[: part.nbytes], at + start)
            except StoreCorrupted:
                return False
            if not same(buffer[: part.nbytes], part):
                return False
        return True

    def close(self) -> None:
        """Gives the descriptor back; twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._disk.close(fd)

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # at exit modules are emptied, `contextlib` too; the system closes it
            pass


def open_plain(disk: Disk, path: str) -> tuple[int, int]:
    """A descriptor of a plain file, and its size. Raises StoreCorrupted: not there, a link, or something else; and OSError."""
    try:
        fd = disk.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise StoreCorrupted(f"{path} is missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreCorrupted(f"{path} is a link; expected a plain file") from None
        with annotate_os_error("open", path):
            raise error
    try:
        with annotate_os_error("look at", path):
            return fd, disk.size(fd)
    except OSError as error:
        disk.close(fd)
        if error.errno == errno.EINVAL:
            raise StoreCorrupted(f"{path} is no plain file") from None
        raise


def same(one: memoryview, other: memoryview) -> bool:
    """Whether two strings of bytes of one length are the same."""
    whole = one.nbytes & ~7
    words, more = (np.frombuffer(bytes[:whole], np.uint64) for bytes in (one, other))
    return bool((words == more).all()) and one[whole:] == other[whole:]


def bytes_of(block: Array) -> memoryview:
    """The bytes of a contiguous block."""
    return flat(block)


def _info(layout: Layout, index: int, start: int, stop: int) -> dict[str, Any]:
    kind, shape = stored(layout.dtype, layout.block_shape(index))
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
