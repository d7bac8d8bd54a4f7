"""Store encoded chunks as byte strings behind addresses, in segments that are freed with their last string.

Strings are appended and never overwritten, so a reader decodes outside the store's lock: it holds memoryviews, and a freed
segment lives until the last of them is gone. An arena is saved segment by segment, unused strings included, so what was
saved stays valid until its segment is freed, and loaded strings keep their addresses (`Spans`).
"""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.memory.lazy_array import Identity, Lazy, Source, in_parts, read_into
from fbuf._host.types import Array, flat, unfit

_AT_ONCE = 1 << 18


class Spans:
    """Parts int64[P, 3] of segments, one after another: number, offset, size.

    Args:
      bits: Of an address that are its offset.
    Raises:
      ValueError: they overlap, are not in order or have no bytes.
    """

    def __init__(self, table: Array, bits: int) -> None:
        if bits not in (24, 30):
            raise unfit(f"offsets have {bits} bits", "24 or 30")
        self.table = table
        number, offset, size = table.T
        end = offset + size
        follows = (number[1:] == number[:-1]) & (offset[1:] == end[:-1])
        after = (number[1:] > number[:-1]) | ((number[1:] == number[:-1]) & (offset[1:] >= end[:-1]))
        ranges = (number >= 0) & (number < 1 << 63 - bits) & (offset >= 0) & (size > 0) & (size <= 1 << 40)
        first = np.concatenate([[True], ~follows])[: len(table)]
        begin = np.flatnonzero(first)
        if not ranges.all() or not after.all() or (offset[begin] >= 1 << bits).any():
            raise unfit(f"span has {len(table)} parts of segments, not all in order", "them in order, none twice")
        place = np.concatenate([[0], np.cumsum(size)])
        self.total = int(place[-1])
        # Parts that follow one another are one run; a string may span them.
        self._address = (number[begin] << bits | offset[begin]).astype(np.uint64)
        self._place = place[begin]
        self._size = np.diff(place[np.append(begin, len(table))])

    def find(self, address: Array, length: Array) -> Array:
        """Return int64[M], the places of strings in the whole. Raises ValueError if one is elsewhere."""
        if not len(address):
            return np.zeros(0, np.int64)
        run = np.searchsorted(self._address, address, side="right") - 1
        if len(self._address):
            inside = (address - self._address[run]).astype(np.int64)
            if (run >= 0).all() and ((inside >= 0) & (inside + length <= self._size[run])).all():
                return np.asarray(self._place[run] + inside)
        raise unfit("address names bytes that span does not have", "parts of segments")

    def segments(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Yield each segment with its parts: offset, size, place."""
        place = 0
        for number, rows in itertools.groupby(self.table.tolist(), key=lambda row: int(row[0])):
            parts = []
            for _, offset, size in rows:
                parts.append((offset, size, place))
                place += size
            yield number, parts


def strings(payload: Source, place: Array, length: Array) -> Iterator[tuple[Array, list[memoryview]]]:
    """Yield strings of a whole, some at a time, in the order of their places: which, and their bytes."""
    order = np.argsort(place, kind="stable")
    end = (place + length)[order]
    reach = np.maximum.accumulate(end)
    start = 0
    while start < len(order):
        low = int(place[order[start]])
        stop = max(int(np.searchsorted(reach, low + _AT_ONCE, side="right")), start + 1)
        data = flat(np.ascontiguousarray(payload[low : int(reach[stop - 1])]))
        which = order[start:stop]
        first = place[which] - low
        yield which, [data[a:b] for a, b in zip(first.tolist(), (first + length[which]).tolist(), strict=True)]
        start = stop


_OFFSET_BITS = 24  # an address is segment << 24 | offset
_LARGE = 256 * 1024
"""Bytes of the largest segment. A segment is a 192nd of what is stored: small ones lose half a chunk each, large ones their
tail."""
_SLAB = 1 << 22  # bytes loaded at once
_READERS = 2  # threads that load slabs
_LARGE_PAGE = 1 << 21  # numpy asks for large pages from twice as many bytes on
_PART = 1 << 20  # bytes saved at once: all of a segment, unless a string is larger


@dataclass
class Slab:
    """Memory that several segments were loaded into at once, which saves page faults."""

    size: int
    segments: int = 0  # that are there still


class Segment:
    """A range of bytes, append-only."""

    __slots__ = ("array", "size", "view", "bytes", "chunks", "used", "slab")

    def __init__(self, array: Array, slab: Slab | None = None) -> None:
        self.array = array
        self.size = len(array)
        self.view = flat(array)
        self.used = 0  # bytes, of chunks that are live or were
        self.bytes = 0  # of live chunks
        self.chunks = 0
        self.slab = slab  # it is a part of that, which is freed as a whole


class SegmentPool(abc.ABC):
    """Byte strings by address, in segments that are freed with their last string."""

    bits: int  # of an address that are its offset
    header = 0  # bytes before each string
    small: int  # bytes of the smallest segment

    def __init__(self, tails: int = 1) -> None:
        self.segments: dict[int, Any] = {}
        self.capacity = 0  # bytes allocated
        self.live = 0  # bytes in use
        self._next = 0
        self._tails = [-1] * tails  # segments being filled
        self._offsets = [0] * tails
        self.grown = False  # a segment was added since compaction was last considered
        self._identity = Identity()

    @abc.abstractmethod
    def append(self, blobs: Sequence[bytes | memoryview], tail: int = 0) -> Array:
        """Store strings; return addresses uint64[len(blobs)]."""

    @abc.abstractmethod
    def _drop(self, number: int) -> None:
        """Free a segment."""

    def _split(self, addresses: Array) -> tuple[Array, Array]:
        """Return segments uint64 and offsets int64."""
        return addresses >> np.uint64(self.bits), (addresses & np.uint64((1 << self.bits) - 1)).astype(np.int64)

    def _by_segment(self, addresses: Array, lengths: Array) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, number of strings, their bytes with headers)."""
        numbers, inverse = np.unique(addresses >> np.uint64(self.bits), return_inverse=True)
        counts = np.bincount(inverse.reshape(-1))
        sizes = np.bincount(inverse.reshape(-1), lengths).astype(np.int64) + self.header * counts
        return zip(numbers.tolist(), counts.tolist(), sizes.tolist(), strict=True)

    def view(self, address: int, length: int) -> memoryview:
        """Return a string, in place: it does not change while the view lives. Empty if it was lost."""
        segment, offset = self.segments.get(address >> self.bits), address & (1 << self.bits) - 1
        return memoryview(b"") if segment is None else segment.view[offset : offset + length]

    def views(self, addresses: Array, lengths: Array) -> list[memoryview]:
        """Return many strings."""
        segment, low = self._split(addresses)
        numbers = segment.tolist()
        views = {n: self.segments[n].view if n in self.segments else memoryview(b"") for n in set(numbers)}
        spans = zip(numbers, low.tolist(), (low + lengths).tolist(), strict=True)
        return [views[n][a:b] for n, a, b in spans]

    def move(self, addresses: Array, lengths: Array) -> Array:
        """Store strings again; the old ones are still there. Raises MemoryError or OSError."""
        return self.append(self.views(addresses - np.uint64(self.header), lengths.astype(np.int64) + self.header))

    def hold(self, addresses: Array, lengths: Array) -> None:
        """Count strings that were loaded or found as live."""
        for number, count, size in self._by_segment(addresses, lengths):
            self.segments[number].chunks += count
            self.segments[number].bytes += size
            self.live += size

    def release(self, addresses: Array, lengths: Array) -> None:
        """Free strings. Cost: a few numpy calls and one step per segment touched."""
        if not addresses.size:
            return
        for number, count, size in self._by_segment(addresses, lengths):
            segment = self.segments.get(number)
            if segment is not None:  # else it was lost
                segment.chunks -= count
                segment.bytes -= size
                self.live -= size
                self._drop_if_empty(number)

    def undo(self, addresses: Array, lengths: Array) -> None:
        """Undo the last `append`, which no reader has seen."""
        self.release(addresses, lengths)

    @abc.abstractmethod
    def commit(self) -> None:
        """Keep the last `append`."""

    def prune(self) -> None:
        """Free the segments in which nothing is live."""
        for number in list(self.segments):
            self._drop_if_empty(number)

    def _drop_if_empty(self, number: int) -> None:
        segment = self.segments.get(number)
        if segment is not None and segment.chunks == 0 and number not in self._tails:
            self._drop(number)

    def sparse(self) -> list[int]:
        """Return the segments worth emptying: less than half used, when a quarter of all is waste.

        Without this a lane that gets few rows would keep whole segments alive for one string each.
        """
        if not self.grown or self.capacity - self.live <= max(self.live // 4, 4 * self.small):
            return []
        self.grown = False
        return [n for n, s in self.segments.items() if n not in self._tails and 2 * s.bytes < s.size]

    def within(self, addresses: Array, segments: Sequence[int]) -> Array:
        """Return which strings are in one of these segments."""
        return np.isin(addresses >> np.uint64(self.bits), segments)


class Arena(SegmentPool):
    """Byte strings in memory.

    Args:
      tails: Segments filled in parallel, for strings of different lifetimes.
    """

    bits = _OFFSET_BITS
    small = 32 * 1024

    def append(self, blobs: Sequence[bytes | memoryview], tail: int = 0) -> Array:
        """Store strings; return addresses uint64[len(blobs)]. On MemoryError nothing is stored."""
        addresses = np.empty(len(blobs), np.uint64)
        done = 0
        try:
            for i, blob in enumerate(blobs):
                size, offset = len(blob), self._offsets[tail]
                segment = self.segments.get(self._tails[tail])
                if segment is None or offset + size > segment.size or offset >> _OFFSET_BITS:
                    segment, offset = self._grow(size, tail), 0
                segment.view[offset : offset + size] = blob
                addresses[i] = self._tails[tail] << _OFFSET_BITS | offset
                segment.bytes += size
                segment.chunks += 1
                self.live += size
                self._offsets[tail] = segment.used = offset + size
                done += 1
        except BaseException:
            self.release(addresses[:done], np.array([len(b) for b in blobs[:done]], np.int64))
            raise
        return addresses

    def commit(self) -> None:
        """Do nothing: an `append` to memory is complete."""

    def _grow(self, least: int, tail: int) -> Segment:
        size = min(max(self.live // 192, self.small), _LARGE) + 4095 & ~4095
        segment = Segment(np.empty(max(size, least), np.uint8))
        full, self._tails[tail] = self._tails[tail], self._next
        self._offsets[tail], self._next = 0, self._next + 1
        self._drop_if_empty(full)
        self.segments[self._tails[tail]] = segment
        self.capacity += segment.size
        self.grown = True
        return segment

    def _drop(self, number: int) -> None:
        segment = self.segments.pop(number)
        if segment.slab is not None:
            segment.slab.segments -= 1
        self.capacity -= _freed(segment)

    @property
    def memory(self) -> int:
        """Return the bytes of memory."""
        return self.capacity

    # ---------------------------------------------------------------- checkpoints

    def saved(self, addresses: Array, lengths: Array) -> tuple[Array, Lazy]:
        """Return the segments that hold live strings: `Spans.table`, and their bytes, without a copy."""
        table, parts, name = [], [], str(self._identity)
        for number, segment in sorted(self.segments.items()):
            for offset in range(0, segment.used if segment.chunks else 0, _PART):
                size = min(segment.used - offset, _PART)
                table.append((number, offset, size))
                read = functools.partial(_bytes_of, segment.array, offset, size)
                parts.append((f"{number}/{offset}", f"{name}:{number}/{offset}:{size}", size, read))
        return np.array(table, np.int64).reshape(-1, 3), in_parts(parts)

    def adopt(self, spans: Spans, payload: Source, addresses: Array, lengths: Array) -> None:
        """Load the segments of another arena into this new one, with the strings that are live.

        Raises:
          ValueError: parts of a segment are missing.
        """
        whole, start = list(spans.segments()), 0
        sizes = [parts[-1][0] + parts[-1][1] for _, parts in whole]
        if any(sum(size for _, size, _ in parts) != total for (_, parts), total in zip(whole, sizes, strict=True)):
            raise unfit("parts of segments are missing", "all of each")
        slabs: list[tuple[Array, int]] = []
        while start < len(whole):
            stop, size = start + 1, sizes[start]
            while stop < len(whole) and size + sizes[stop] <= _SLAB:
                size += sizes[stop]
                stop += 1
            first = whole[start][1][0][2]
            array, slab, at = _large(size), Slab(size), 0
            slabs.append((array, first))
            for number, total in zip([number for number, _ in whole[start:stop]], sizes[start:stop], strict=True):
                segment = self.segments[number] = Segment(array[at : at + total], slab)
                segment.used = total
                slab.segments += 1
                self._next, at = number + 1, at + total
            self.capacity += size
            start = stop

        readers = _READERS if getattr(payload, "bar", None) is None else 1  # one thread reports progress
        with ThreadPoolExecutor(readers, thread_name_prefix="fbuf-load") as pool:
            for reading in [pool.submit(read_into, payload, first, array) for array, first in slabs]:
                reading.result()
        self.hold(addresses, lengths)
        self.prune()


def _large(size: int) -> Array:
    """Return uint8[size] that begins with a large page: such pages are made 30 times as fast as small ones."""
    if size < _LARGE_PAGE:
        return np.empty(size, np.uint8)
    array = np.empty(size + _LARGE_PAGE, np.uint8)
    first = -array.__array_interface__["data"][0] % _LARGE_PAGE
    return array[first : first + size]


def _freed(segment: Segment) -> int:
    """Return the bytes of memory freed with a segment."""
    if segment.slab is None:
        return segment.size
    return 0 if segment.slab.segments else segment.slab.size


def _bytes_of(array: Array, offset: int, size: int) -> Array:
    return array[offset : offset + size]
