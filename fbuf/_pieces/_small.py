"""Leaves that are not encoded in chunks, on their way into a piece: as bits, as codes of a few values, or as they are.

Flags, actions and rewards take on few values. As codes of one byte, or one bit, they fit into memory for any number of rows
that a machine can sample from (50 million rows: 50 MB a leaf), which is far faster than a look into a file for each row drawn.
Codes are made while rows are written, when it costs nothing that shows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._host.arrays import Array
from fbuf._pieces._schema import Leaf

MOST_CODES = 256
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_words(values: Array) -> Array:
    """The bits of numbers, as unsigned integers, so that NaNs and negative zeros are values like others."""
    return np.ascontiguousarray(values).reshape(-1).view(_WORDS[values.dtype.itemsize])


def coded(leaf: Leaf) -> bool:
    """Whether codes may be smaller than the leaf itself."""
    return leaf.shape == () and leaf.dtype != np.bool_ and 2 <= leaf.dtype.itemsize <= 8


class Collected:
    """Rows of a leaf, appended to."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.rows = 0
        self._codes = coded(leaf)
        self._palette: Array = np.zeros(0, _WORDS.get(leaf.dtype.itemsize, np.uint8))
        self._order: Array = np.zeros(0, np.int64)  # of the palette, sorted
        self._room: Array = np.empty((0, *leaf.shape), np.uint8 if self._codes else leaf.dtype)

    def append(self, values: Array) -> None:
        """Takes `[N, *shape]`."""
        if self._codes:
            words = as_words(values)
            codes = self._codes_of(words)
            if codes is None:
                palette = np.concatenate([self._palette, np.setdiff1d(words, self._palette)])
                if len(palette) > MOST_CODES:
                    self._plain()
                else:
                    self._palette, self._order = palette, np.argsort(palette)
                    codes = self._codes_of(words)
            values = values if codes is None else codes
        stop = self.rows + len(values)
        if stop > len(self._room):
            room = np.empty((max(stop, len(self._room) * 3 // 2), *self.leaf.shape), self._room.dtype)
            room[: self.rows] = self._room[: self.rows]
            self._room = room
        self._room[self.rows : stop] = values
        self.rows = stop

    def _codes_of(self, words: Array) -> Array | None:
        """Codes of values, if all are in the palette."""
        if not len(self._palette):
            return None
        at = self._order.take(np.searchsorted(self._palette, words, sorter=self._order), mode="clip")
        return at.astype(np.uint8) if (self._palette[at] == words).all() else None

    def _plain(self) -> None:
        """Too many values for codes."""
        self._room = self._palette[self._room[: self.rows]].view(self.leaf.dtype)
        self._codes = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._room.nbytes

    def to_arrays(self) -> dict[str, Any]:
        """As a piece has them."""
        rows = self._room[: self.rows]
        if self.leaf.dtype == np.bool_ and self.leaf.shape == ():
            return {"bits": np.packbits(rows, bitorder="little")}
        if self._codes:
            return {"codes": rows, "palette": self._palette}
        return {"values": rows}
