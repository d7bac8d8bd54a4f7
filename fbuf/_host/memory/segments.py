"""Segments of an arena as one string of bytes: where in it an address lies, and the strings of it in their order.

An arena is saved segment by segment, as its bytes lie there, strings that are no longer needed included: so what was saved
once stays as it is until its segment goes, nothing is gathered, and what is loaded has the addresses that it had. Rejected:
strings in the order of their rows (every string is looked at in every save, and where rows are replaced in any order all of it
changes).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from fbuf._host.memory.lazy_array import Source
from fbuf._host.types import Array, flat

_AT_ONCE = 1 << 18


class Spans:
    """Pieces int64[P, 3] of segments, one after another: number, offset, size.

    Args:
      bits: Of an address that are its offset.
    Raises:
      ValueError: they overlap, are not in order or have no bytes.
    """

    def __init__(self, table: Array, bits: int) -> None:
        if bits not in (24, 30):
            raise ValueError(
                f"Store.from_arrays: offsets have {bits} bits; expected 24 or 30. Load another checkpoint."
            )
        self.table = table
        number, offset, size = table.T
        end = offset + size
        follows = (number[1:] == number[:-1]) & (offset[1:] == end[:-1])
        after = (number[1:] > number[:-1]) | ((number[1:] == number[:-1]) & (offset[1:] >= end[:-1]))
        ranges = (number >= 0) & (number < 1 << 63 - bits) & (offset >= 0) & (size > 0) & (size <= 1 << 40)
        first = np.concatenate([[True], ~follows])[: len(table)]
        begin = np.flatnonzero(first)
        if not ranges.all() or not after.all() or (offset[begin] >= 1 << bits).any():
            raise ValueError(
                f"Store.from_arrays: span has {len(table)} pieces of segments, not all in order; expected them in order, none "
                f"twice. Load another checkpoint."
            )
        place = np.concatenate([[0], np.cumsum(size)])
        self.total = int(place[-1])
        # Pieces that follow one another are one run; a string may lie across its pieces.
        self._address = (number[begin] << bits | offset[begin]).astype(np.uint64)
        self._place = place[begin]
        self._size = np.diff(place[np.append(begin, len(table))])

    def find(self, address: Array, length: Array) -> Array:
        """int64[M], places of strings in the whole. Raises ValueError: one lies elsewhere."""
        if not len(address):
            return np.zeros(0, np.int64)
        run = np.searchsorted(self._address, address, side="right") - 1
        if len(self._address):
            inside = (address - self._address[run]).astype(np.int64)
            if (run >= 0).all() and ((inside >= 0) & (inside + length <= self._size[run])).all():
                return np.asarray(self._place[run] + inside)
        raise ValueError(
            "Store.from_arrays: address names bytes that span does not have; expected pieces of segments. Load another "
            "checkpoint."
        )

    def segments(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Each segment with its pieces: offset, size, place."""
        place = 0
        for number, rows in itertools.groupby(self.table.tolist(), key=lambda row: int(row[0])):
            own = []
            for _, offset, size in rows:
                own.append((offset, size, place))
                place += size
            yield number, own


def strings(payload: Source, place: Array, length: Array) -> Iterator[tuple[Array, list[memoryview]]]:
    """Strings of a whole, some at a time, in the order in which they lie: which, and what they are."""
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
