"""Store encoded chunks in files: what `Arena` is for memory, for columns larger than that.

A segment is a file, appended to with `pwrite` and read through a mapping. It is deleted with its last chunk; readers that
hold its bytes keep them. A header before each chunk says which chunk it is, so the index can be rebuilt (`scan`). Of two
headers for one chunk the later is right: a chunk is written twice only when it was moved, or after a failed write. The room
of a failed write is emptied before reuse, and a new process begins a new segment. A segment is a sixteenth of what is
stored, which bounds both waste and open files. One whose chunks were moved is removed by the next flush (`Folder.retire`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fbuf._host.io.directory import Folder, is_store_name
from fbuf._host.io.file import File, check_size, once, unlink
from fbuf._host.memory.arena import SegmentPool
from fbuf._host.memory.lazy_array import Lazy, in_parts
from fbuf._host.types import Array

_OFFSET_BITS = 30  # an address is segment << 30 | offset
_OFFSET = (1 << _OFFSET_BITS) - 1
_LARGE = 1 << 30
NOWHERE = np.uint64((1 << 64) - 1)
"""The address of a chunk that was lost."""
_MAGIC = b"fbc1"
_HEADER = struct.Struct("<4sIQQII")  # magic, lane, chunk, dictionary, length, checksum; then a crc of these
HEADER = _HEADER.size + 4
_BLOCK = 1 << 20
_LEAST_PART, _MOST_PART = 1 << 18, 1 << 22
"""Bytes of a segment saved at once: a 64th of it, aligned to pages."""


class Entry(NamedTuple):
    """What a header says, and where its chunk is."""

    lane: int
    chunk: int
    dictionary: int  # fingerprint; 0: none
    length: int
    checksum: int
    address: int


class Segment:
    """A file of chunks, append-only."""

    __slots__ = ("file", "view", "bytes", "chunks", "size", "used")

    def __init__(self, file: File) -> None:
        self.file = file
        self.size = file.size
        self.view = file.map()
        self.used = 0  # bytes, of chunks that are live or were
        self.bytes = 0  # of live chunks
        self.chunks = 0

    @property
    def part_size(self) -> int:
        """Return how many bytes are saved at once."""
        return min(max(1 << (self.size // 64).bit_length(), _LEAST_PART), _MOST_PART)


class FileArena(SegmentPool):
    """Chunks by address, in the files `<name>.segment-<number>` of a folder."""

    bits = _OFFSET_BITS
    header = HEADER
    small = 1 << 20
    memory = 0
    """Bytes of memory: none, but for the page cache."""

    def __init__(self, folder: Folder, name: str) -> None:
        super().__init__()
        self._path = f"{folder.path}/{name}.segment-"
        self._folder = folder
        self._moved: set[int] = set()  # segments whose chunks may have copies that no flush waited for
        self._undo: tuple[int, int, int] | None = None
        self._crc = folder.crc
        if not folder.fresh:
            for file in filter(is_store_name, folder.files(f"{name}.segment-")):
                number = int(file.rpartition("-")[2])
                self._next = max(self._next, number + 1)
                found = File(folder.file(file))
                if found.size:
                    self._enter(number, found)
                    self._moved.add(number)
                found.close()

    def head(self, lane: int, chunk: int, dictionary: int, length: int, checksum: int) -> bytes:
        """Return the bytes before a chunk."""
        head = _HEADER.pack(_MAGIC, lane, chunk, dictionary, length, checksum)
        return head + struct.pack("<I", self._crc(head))

    def _enter(self, number: int, file: File) -> Segment:
        segment = self.segments[number] = Segment(file)
        self.capacity += segment.size
        return segment

    def view(self, address: int, length: int) -> memoryview:
        """Return a chunk as `Arena` does. Raises StoreCorrupted: its file was cut short."""
        self._check((address >> _OFFSET_BITS,))
        return super().view(address, length)

    def views(self, addresses: Array, lengths: Array) -> list[memoryview]:
        """Return many chunks. Raises StoreCorrupted: a file was cut short."""
        self._check(np.unique(addresses >> np.uint64(_OFFSET_BITS)).tolist())
        return super().views(addresses, lengths)

    def _check(self, numbers: Iterable[int]) -> None:
        for segment in filter(None, map(self.segments.get, numbers)):
            check_size(segment.view, segment.file.path)

    # ---------------------------------------------------------------- writing

    def append(self, blobs: Sequence[bytes | memoryview], tail: int = 0) -> Array:
        """Store records, header and chunk each; return addresses uint64 of the chunks. On OSError nothing is stored."""
        addresses = np.empty(len(blobs), np.uint64)
        mark = self._undo = self._tails[0], self._offsets[0], self._next
        pending: list[bytes | memoryview] = []
        start = self._offsets[0]
        done = 0
        try:
            for i, record in enumerate(blobs):
                size = len(record)
                segment = self.segments.get(self._tails[0])
                if segment is None or self._offsets[0] + size > segment.size or self._offsets[0] + HEADER > _OFFSET:
                    if segment is not None:
                        segment.file.write(b"".join(pending), start)
                        if self._tails[0] != mark[0]:
                            segment.file.close()
                    pending, start = [], 0
                    segment = self._grow(size)
                pending.append(record)
                addresses[i] = self._tails[0] << _OFFSET_BITS | self._offsets[0] + HEADER
                segment.bytes += size
                segment.chunks += 1
                self.live += size
                self._offsets[0] = segment.used = self._offsets[0] + size
                done += 1
            if pending:
                self.segments[self._tails[0]].file.write(b"".join(pending), start)
        except BaseException:
            self.undo(addresses[:done], np.array([len(r) - HEADER for r in blobs[:done]], np.int64))
            raise
        return addresses

    def _grow(self, least: int) -> Segment:
        size = min(max(self.live // 16, self.small), _LARGE) + 4095 & ~4095
        size = max(size, least + 4095 & ~4095)
        segment = self._enter(self._next, File(f"{self._path}{self._next:08d}", size))
        self._tails[0], self._offsets[0], self._next = self._next, 0, self._next + 1
        self.grown = True
        return segment

    def undo(self, addresses: Array, lengths: Array) -> None:
        """Undo the last `append`, which no reader has seen."""
        self.release(addresses, lengths)
        if self._undo is None:
            return
        tail, offset, first = self._undo
        self._undo = None
        for number in [n for n in self.segments if n >= first]:
            self._drop(number)
        self._tails[0], self._offsets[0] = tail, offset
        segment = self.segments.get(tail)
        if segment is not None:
            segment.used = offset
        if segment is not None and segment.file.fd >= 0:
            with contextlib.suppress(OSError):  # on failure the segment is not used for later writes
                segment.file.empty(offset)
                return
        self._tails[0] = -1

    def commit(self) -> None:
        """Keep the last `append`, and close the files that it filled."""
        if self._undo is not None and self._undo[0] != self._tails[0]:
            for number, segment in self.segments.items():
                if number != self._tails[0]:
                    try:
                        segment.file.close()
                    except OSError:  # its rows count already
                        self._folder.distrust(os.path.basename(segment.file.path))
            self.prune()
        self._undo = None

    # ---------------------------------------------------------------- eviction

    def hold(self, addresses: Array, lengths: Array) -> None:
        """Count chunks that a scan found as live."""
        super().hold(addresses, lengths)
        numbers, inverse = np.unique(addresses >> np.uint64(_OFFSET_BITS), return_inverse=True)
        end: Array = np.zeros(len(numbers), np.int64)
        np.maximum.at(end, inverse.reshape(-1), (addresses & np.uint64(_OFFSET)).astype(np.int64) + lengths)
        for number, stop in zip(numbers.tolist(), end.tolist(), strict=True):
            self.segments[number].used = max(self.segments[number].used, stop)

    def move(self, addresses: Array, lengths: Array) -> Array:
        """Store strings again; the old ones are still there. Raises OSError."""
        moved = super().move(addresses, lengths)
        self._moved.update((addresses >> np.uint64(_OFFSET_BITS)).tolist())
        return moved

    def _drop(self, number: int) -> None:
        segment = self.segments.pop(number)
        self.capacity -= segment.size
        with contextlib.suppress(OSError):
            segment.file.close()
        if number in self._moved:
            self._moved.remove(number)
            self._folder.retire(os.path.basename(segment.file.path))
        else:  # its rows have expired, or were never written
            unlink(segment.file.path)

    # ---------------------------------------------------------------- resuming

    def scan(self) -> Iterator[Entry]:
        """Yield what the headers say, in the order they were written. The chunks themselves are not checked."""
        for number in sorted(self.segments):
            file = File(self.segments[number].file.path)
            at, block, base = 0, b"", 0
            while at + HEADER <= file.size:
                if not base <= at <= base + len(block) - HEADER:
                    block, base = file.read(at, _BLOCK), at
                head = block[at - base : at - base + HEADER]
                if len(head) < HEADER:
                    break
                magic, lane, chunk, dictionary, length, checksum = _HEADER.unpack(head[:-4])
                whole = magic == _MAGIC and struct.pack("<I", self._crc(head[:-4])) == head[-4:]
                if whole and at + HEADER + length <= file.size:
                    yield Entry(lane, chunk, dictionary, length, checksum, number << _OFFSET_BITS | at + HEADER)
                    at += HEADER + length
                    continue
                # The end, or a damaged header: look for the next one.
                found = block.find(_MAGIC, at - base + 1)
                if found < 0 and base + len(block) >= file.size:
                    break
                at = base + (found if found >= 0 else max(len(block) - len(_MAGIC) + 1, at - base + 1))

    # ---------------------------------------------------------------- checkpoints

    def saved(self, addresses: Array, lengths: Array) -> tuple[Array, Lazy]:
        """Return the parts of segments that hold a live chunk: `Spans.table`, and their bytes, read from the files on demand.

        Args:
          addresses, lengths: Of the live ones, and zeros.
        """
        table, parts, name = [], [], str(self._identity)
        stored = (addresses != NOWHERE) & (addresses > 0)  # a header comes before the first one
        addresses, lengths = addresses[stored], lengths[stored].astype(np.int64)
        numbers, offsets = addresses >> np.uint64(_OFFSET_BITS), (addresses & np.uint64(_OFFSET)).astype(np.int64)
        order = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(numbers[order], prepend=NOWHERE, append=NOWHERE))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            picks = order[start:stop]
            number, first = int(numbers[picks[0]]), offsets[picks] - HEADER
            segment = self.segments[number]
            reach: Array = np.zeros(-(-segment.size // segment.part_size) + 1, np.int64)
            np.add.at(reach, first // segment.part_size, 1)
            np.add.at(reach, (offsets[picks] + lengths[picks] - 1) // segment.part_size + 1, -1)
            for at in np.flatnonzero(np.cumsum(reach)).tolist():
                offset = at * segment.part_size
                size = min(segment.used - offset, segment.part_size)
                table.append((number, offset, size))
                read = functools.partial(once, segment.view, offset, size, segment.file.path)
                parts.append((f"{number}/{offset}", f"{name}:{number}/{offset}:{size}", size, read))
        return np.array(table, np.int64).reshape(-1, 3), in_parts(parts)

    def forget(self, addresses: Sequence[int]) -> None:
        """Erase the headers of chunks for good. Raises OSError."""
        for number in sorted({address >> _OFFSET_BITS for address in addresses}):
            file = File(f"{self._path}{number:08d}")
            for address in addresses:
                if address >> _OFFSET_BITS == number:
                    file.write(bytes(HEADER), (address & _OFFSET) - HEADER)
            file.sync()
            file.close()
