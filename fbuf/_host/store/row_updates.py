"""Changed rows, beside the stream: each keeps the columns that differ from the row it comes from.

A patch lives under a ticket with bit 63 set and goes with the row it replaced, or `slack` patches after another one has
replaced it. Python objects and single frames are good enough: these are corrections, not streams. A dictionary comes and goes
with its chunks, so a patch is encoded without.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fbuf._host.codecs.base import Codec, Zstd
from fbuf._host.types import Array, StoreCorrupted, flat

PATCH = 1 << 63
_OVERHEAD = 600  # bytes of Python objects a patch takes, about
_RAW, _ZSTD = b"\0", b"\1"
_HEAD = 5  # bytes of a value that say how it is encoded, and the checksum of the rest


@dataclass
class Patch:
    """A changed row: the row of the stream it comes from, and the columns that differ from it."""

    lane: int
    count: int
    values: dict[int, bytes]
    superseded: int = -1  # patches made when another patch replaced this one


class Patches:
    """All changed rows of a store. Not thread-safe; exceptions leave it as it was."""

    def __init__(self, codecs: Sequence[Codec | None], slack: int) -> None:
        self.held: dict[int, Patch] = {}  # by ticket
        self.made = 0
        self.nbytes = 0
        self._codecs = codecs
        self._slack = max(slack, 1)
        self._origins: dict[tuple[int, int], list[int]] = {}  # tickets by the row they come from
        self._heaps: dict[int, list[int]] = {}  # counts of those rows by lane, oldest first
        self._superseded: deque[int] = deque()

    def prepare(self, old: int, lane: int, count: int, fields: Mapping[int, Array]) -> Patch:
        """The row of ticket `old`, row `count` of its lane, with these columns replaced; not yet stored."""
        before = self.held.get(old)
        values = dict(before.values) if before is not None else {}
        return Patch(lane, count, values | {c: self._encode(c, v) for c, v in fields.items()})

    def add(self, patches: Sequence[tuple[int, Patch]]) -> list[int]:
        """Stores prepared patches, each with the ticket it replaces; returns their tickets."""
        tickets = []
        for old, patch in patches:
            self.made += 1
            self.insert(PATCH | self.made, patch)
            tickets.append(PATCH | self.made)
            replaced = self.held.get(old)
            if replaced is not None and replaced.superseded < 0:
                replaced.superseded = self.made
                self._superseded.append(old)
        while self._superseded and self._drop(self._superseded[0]):
            self._superseded.popleft()
        return tickets

    def insert(self, ticket: int, patch: Patch) -> None:
        """Stores a patch under this ticket."""
        self.held[ticket] = patch
        self.nbytes += _size(patch)
        origin = patch.lane, patch.count
        if origin not in self._origins:
            self._origins[origin] = []
            heapq.heappush(self._heaps.setdefault(patch.lane, []), patch.count)
        self._origins[origin].append(ticket)

    def resume(self, made: int) -> None:
        """Goes on after a checkpoint's patches were inserted."""
        self.made = made
        order = sorted((p.superseded, t) for t, p in self.held.items() if p.superseded >= 0)
        self._superseded.extend(t for _, t in order)

    def _drop(self, ticket: int) -> bool:
        """Forgets a superseded patch unless it is too recent."""
        patch = self.held.get(ticket)
        if patch is not None:
            if self.made - patch.superseded < self._slack:
                return False
            # Its successor has the same origin, so the origin's list does not run empty.
            self._origins[patch.lane, patch.count].remove(ticket)
            self._remove(ticket)
        return True

    def expire(self, low: Array) -> None:
        """Forgets patches of rows before int64[E] `low`."""
        for lane in list(self._heaps):
            heap, least = self._heaps[lane], int(low[lane])
            while heap and heap[0] < least:
                for ticket in self._origins.pop((lane, heapq.heappop(heap))):
                    self._remove(ticket)
            if not heap:
                del self._heaps[lane]

    def forget(self, counts: Sequence[int]) -> None:
        """Forgets patches of these rows, where rows lie in no order (and `expire` has no meaning)."""
        self._heaps.clear()
        if self._origins:
            for count in counts:
                for ticket in self._origins.pop((0, count), ()):
                    self._remove(ticket)

    def _remove(self, ticket: int) -> None:
        self.nbytes -= _size(self.held.pop(ticket))

    def _encode(self, column: int, value: Array) -> bytes:
        kind, data = _RAW, bytes(flat(np.ascontiguousarray(value)))
        codec = self._codecs[column]
        if isinstance(codec, Zstd) and len(data) >= 64:
            packed = codec.encode(np.frombuffer(data, np.uint8))
            if len(packed) < len(data):
                kind, data = _ZSTD, packed
        return kind + zlib.crc32(data, kind[0]).to_bytes(4, "little") + data

    def decode(self, column: int, value: bytes, target: memoryview) -> None:
        """Puts a value of a patch into `target`. Raises StoreCorrupted on damaged bytes."""
        kind, data, codec = value[:1], memoryview(value)[_HEAD:], self._codecs[column]
        intact = len(value) >= _HEAD and value[1:_HEAD] == zlib.crc32(data, kind[0]).to_bytes(4, "little")
        if intact and kind == _ZSTD and isinstance(codec, Zstd):
            codec.decode(data, np.frombuffer(target, np.uint8))
        elif intact and kind == _RAW and len(data) == len(target):
            target[:] = data
        else:
            raise StoreCorrupted(
                f"Store.read: a changed row of column {column} is damaged; expected {len(target)} bytes as stored. "
                f"Load the last checkpoint with fbuf.load(path)."
            )


def _size(patch: Patch) -> int:
    return _OVERHEAD + sum(map(len, patch.values.values()))
