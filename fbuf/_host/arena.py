"""Encoded chunks as byte strings behind addresses, in segments that are freed with their last string.

Strings are appended and their bytes never overwritten, so a reader decodes outside the store's lock: it holds
memoryviews, and a segment freed meanwhile lives until the last of them is gone. Rejected: a list of `bytes` (41 bytes of
overhead each), one preallocated byte ring (a lane that stalls blocks it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fbuf._host.arrays import Array, flat

_OFFSET_BITS = 24  # an address is segment << 24 | offset
_OFFSET = (1 << _OFFSET_BITS) - 1
_SMALL, _LARGE = 32 * 1024, 256 * 1024
"""Bytes of a segment; in between a 192nd of what is stored: small ones lose half a chunk each, large ones their tail."""


class Segment:
    """A stretch of bytes, append-only."""

    __slots__ = ("array", "view", "bytes", "chunks")

    def __init__(self, size: int) -> None:
        self.array: Array = np.empty(size, np.uint8)
        self.view = flat(self.array)
        self.bytes = 0  # of live chunks
        self.chunks = 0


class Arena:
    """Byte strings by address; a segment is freed with its last string.

    Args:
      tails: Segments filled side by side, for strings of different life.
    """

    def __init__(self, tails: int = 1) -> None:
        self.segments: dict[int, Segment] = {}
        self.capacity = 0  # bytes allocated
        self.live = 0  # bytes in use
        self._next = 0
        self._tails = [-1] * tails  # segments being filled
        self._offsets = [0] * tails
        self.grown = False  # a segment was added since compaction was last considered

    def append(self, blobs: Sequence[bytes | memoryview], tail: int = 0) -> Array:
        """Addresses uint64[len(blobs)]. On MemoryError nothing is stored."""
        addresses = np.empty(len(blobs), np.uint64)
        done = 0
        try:
            for i, blob in enumerate(blobs):
                size, offset = len(blob), self._offsets[tail]
                segment = self.segments.get(self._tails[tail])
                if segment is None or offset + size > len(segment.array) or offset >> _OFFSET_BITS:
                    segment, offset = self._grow(size, tail), 0
                segment.view[offset : offset + size] = blob
                addresses[i] = self._tails[tail] << _OFFSET_BITS | offset
                segment.bytes += size
                segment.chunks += 1
                self.live += size
                self._offsets[tail] = offset + size
                done += 1
        except BaseException:
            self.release(addresses[:done], np.array([len(b) for b in blobs[:done]], np.int64))
            raise
        return addresses

    def _grow(self, least: int, tail: int) -> Segment:
        size = min(max(self.live // 192, _SMALL), _LARGE) + 4095 & ~4095
        segment = Segment(max(size, least))
        full, self._tails[tail] = self._tails[tail], self._next
        self._offsets[tail], self._next = 0, self._next + 1
        self._drop_if_empty(full)
        self.segments[self._tails[tail]] = segment
        self.capacity += len(segment.array)
        self.grown = True
        return segment

    def _drop_if_empty(self, number: int) -> None:
        segment = self.segments.get(number)
        if segment is not None and segment.chunks == 0 and number not in self._tails:
            self.capacity -= len(segment.array)
            del self.segments[number]

    def view(self, address: int, length: int) -> memoryview:
        """A string, in place: it stays as it is for as long as the view lives."""
        offset = address & _OFFSET
        return self.segments[address >> _OFFSET_BITS].view[offset : offset + length]

    def views(self, addresses: Array, lengths: Array) -> list[memoryview]:
        """Many strings."""
        numbers = (addresses >> np.uint64(_OFFSET_BITS)).tolist()
        low = (addresses & np.uint64(_OFFSET)).astype(np.int64)
        segments = {n: self.segments[n].view for n in set(numbers)}
        spans = zip(numbers, low.tolist(), (low + lengths).tolist(), strict=True)
        return [segments[n][a:b] for n, a, b in spans]

    @property
    def memory(self) -> int:
        """Bytes of memory."""
        return self.capacity

    def move(self, addresses: Array, lengths: Array) -> Array:
        """Stores strings again; the old ones are still there. Raises MemoryError."""
        return self.append(self.views(addresses, lengths))

    def release(self, addresses: Array, lengths: Array) -> None:
        """Gives up strings; cost: a few numpy calls and one step per segment touched."""
        if not addresses.size:
            return
        numbers, inverse = np.unique(addresses >> np.uint64(_OFFSET_BITS), return_inverse=True)
        counts = np.bincount(inverse.reshape(-1)).tolist()
        sizes = np.bincount(inverse.reshape(-1), lengths).astype(np.int64).tolist()
        for number, count, size in zip(numbers.tolist(), counts, sizes, strict=True):
            segment = self.segments[number]
            segment.chunks -= count
            segment.bytes -= size
            self.live -= size
            self._drop_if_empty(number)

    def sparse(self) -> list[int]:
        """Segments worth emptying: less than half used, when a quarter of all is waste.

        Without this a lane that gets few rows would keep whole segments alive for one chunk each.
        """
        if not self.grown or self.capacity - self.live <= max(self.live // 4, 4 * _SMALL):
            return []
        self.grown = False
        return [n for n, s in self.segments.items() if n not in self._tails and 2 * s.bytes < len(s.array)]

    @staticmethod
    def within(addresses: Array, segments: Sequence[int]) -> Array:
        """Which strings lie in one of these segments."""
        return np.isin(addresses >> np.uint64(_OFFSET_BITS), segments)
