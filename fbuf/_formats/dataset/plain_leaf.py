"""A leaf without chunks, of all segments as one column: codes and flags in memory, values there or in files.

A leaf of at most 256 values takes a byte a row in memory, a flag an eighth: every batch reads them several times, and file
reads would take several times as long. Other leaves stay in the files unless they fit the memory limit; their blocks are
checked when first read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset.schema import Leaf
from fbuf._host.memory.lazy_array import expect, lazily, within
from fbuf._host.types import Array, flat


class SegmentColumn:
    """The used rows of one segment, as stored in its file."""

    def __init__(self, leaf: Leaf, saved: Saved, rows: int, begin: int, stop: int) -> None:
        arrays = within(saved.arrays, f"rows/{leaf.name}/")
        self.rows = stop - begin
        self.bits: Array | None = None
        self.codes: Array | None = None
        self.palette: Array | None = None
        self.values: FileRows | None = None
        if leaf.dtype == np.bool_ and leaf.shape == ():
            packed = expect(arrays, "bits", np.uint8, (-(-rows // 8),))
            self.bits = np.unpackbits(packed, count=rows, bitorder="little")[begin:stop]
        elif has_codes(leaf) and "codes" in arrays:
            word = as_words(np.zeros(0, leaf.dtype)).dtype
            self.palette = expect(arrays, "palette", word, (None,))
            self.codes = np.asarray(lazily(arrays, "codes", np.uint8, (rows,))[begin:stop])
            if not 0 < len(self.palette) <= MAX_CODES or int(self.codes.max()) >= len(self.palette):
                raise ValueError(f"leaf '{leaf.name}' has codes without values")
        else:
            self.values = FileRows(leaf, saved, lazily(arrays, "values", leaf.dtype, (rows, *leaf.shape)), begin)

    def fill(self, leaf: Leaf, row: Array, out: Array) -> None:
        """Read used rows int64[M] into `[M, *shape]`."""
        if self.values is not None:
            self.values.fill(row, out)
        else:
            out[...] = self._decode(leaf, row)

    def _decode(self, leaf: Leaf, row: Any) -> Array:
        assert self.codes is not None and self.palette is not None
        return self.palette[self.codes[row]].view(leaf.dtype)

    def whole(self, leaf: Leaf) -> Array:
        """Return all used rows."""
        return self._decode(leaf, slice(None)) if self.values is None else self.values.whole(self.rows)


class FileRows:
    """Rows in a file, read one run at a time; blocks are checked when first read."""

    def __init__(self, leaf: Leaf, saved: Saved, array: Any, begin: int) -> None:
        self._array, self._begin, self._row = array, begin, leaf.nbytes
        self._files: list[OpenFile] = saved.files
        self._first, self._file, self._offset, _, _ = array.block_places()

    def whole(self, rows: int) -> Array:
        """Return the first `rows` used rows."""
        return np.asarray(self._array[self._begin : self._begin + rows])

    def fill(self, row: Array, out: Array) -> None:
        """Read rows int64[M] into `[M, *shape]`. Raises StoreCorrupted."""
        if not len(row) or not self._row:
            return
        row = row + self._begin
        block = np.searchsorted(self._first, row, side="right") - 1
        touched = np.unique(block)
        for first in self._first[touched[~self._array.checked[touched]]].tolist():
            self._array[first : first + 1]  # reads the block, and checks it
        apart = np.ones(len(row), bool)
        apart[1:] = (row[1:] != row[:-1] + 1) | (block[1:] != block[:-1])
        begin = np.flatnonzero(apart)
        size = np.diff(begin, append=len(row)) * self._row
        at = self._offset[block[begin]] + (row[begin] - self._first[block[begin]]) * self._row
        data = flat(out)
        runs = zip(
            self._file[block[begin]].tolist(), at.tolist(), (begin * self._row).tolist(), size.tolist(), strict=True
        )
        for file, offset, to, length in runs:
            part = data[to : to + length]
            try:
                got = os.preadv(self._files[file].fd, [part], offset)
            except OSError:
                got = 0
            if got != length:
                self._files[file].read(part, offset)  # raises, or reads again


@dataclass
class PlainRead:
    """Rows to copy."""

    leaf: PlainLeaf
    row: Array
    starts: Array

    may_be_overwritten = False

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fill the requests' outputs. Raises StoreCorrupted."""
        leaf = self.leaf.leaf
        for row, out in zip(np.split(self.row, self.starts[1:]), outs, strict=True):
            if len(out):
                self.leaf.fill(row, np.frombuffer(out, np.uint8).view(leaf.dtype).reshape(len(row), *leaf.shape))


class PlainLeaf:
    """A leaf of all segments: rows by number."""

    def __init__(self, leaf: Leaf, cuts: Sequence[int] = ()) -> None:
        self.leaf = leaf
        self._cuts = list(cuts)  # rows where a flag reads True
        self._sources: list[SegmentColumn] = []
        self._first: Array = np.zeros(1, np.int64)
        self._bits: Array | None = None
        self._codes: Array | None = None
        self._palette: Array | None = None
        self._values: Array | None = None

    def add(self, saved: Saved, rows: int, begin: int, stop: int) -> None:
        """Add rows `begin` to `stop` of a segment of `rows`. Raises ValueError, StoreCorrupted."""
        self._sources.append(SegmentColumn(self.leaf, saved, rows, begin, stop))

    @property
    def resident_bytes(self) -> int:
        """Return the bytes that the rows would take in memory; 0: they are there as codes or flags."""
        if all(source.values is None for source in self._sources) and self._union() is not None:
            return 0
        return sum(source.rows for source in self._sources) * self.leaf.nbytes

    def _union(self) -> Array | None:
        """Return the values of all segments, if codes can represent them."""
        if self._sources[0].bits is not None:
            return np.zeros(0, np.uint8)
        palettes = [source.palette for source in self._sources if source.palette is not None]
        if len(palettes) < len(self._sources):
            return None
        values = np.unique(np.concatenate(palettes))
        return values if len(values) <= MAX_CODES else None

    def freeze(self, resident: bool) -> None:
        """Build the column, after all segments were added; `resident`: keep the rows in memory."""
        sources = self._sources
        self._first = np.cumsum([0, *(source.rows for source in sources)])
        union = self._union()
        if sources[0].bits is not None:
            flags = np.concatenate([source.bits for source in sources if source.bits is not None])
            flags[self._cuts] = 1
            self._bits = np.packbits(flags, bitorder="little")
        elif union is not None:
            self._codes = np.empty(int(self._first[-1]), np.uint8)
            for start, stop, source in zip(self._first[:-1].tolist(), self._first[1:].tolist(), sources, strict=True):
                assert source.palette is not None and source.codes is not None
                np.take(
                    np.searchsorted(union, source.palette).astype(np.uint8),
                    source.codes,
                    out=self._codes[start:stop],
                    mode="clip",
                )
            self._palette = union.view(self.leaf.dtype)
        elif resident:
            self._values = np.empty((int(self._first[-1]), *self.leaf.shape), self.leaf.dtype)
            for start, stop, source in zip(self._first[:-1].tolist(), self._first[1:].tolist(), sources, strict=True):
                self._values[start:stop] = source.whole(self.leaf)
        else:
            return
        self._sources = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        arrays = [self._bits, self._codes, self._palette, self._values]
        arrays += [source.codes for source in self._sources]
        return sum(array.nbytes for array in arrays if array is not None)

    def fill(self, row: Array, out: Array) -> None:
        """Read rows int64[M] into `[M, *shape]`. Raises StoreCorrupted."""
        if self._bits is not None:
            word = self._bits[row >> 3]
            np.not_equal((word >> (row & 7).astype(np.uint8)) & 1, 0, out=out)
        elif self._codes is not None and self._palette is not None:
            np.take(self._palette, self._codes[row], out=out)
        elif self._values is not None:
            np.take(self._values, row, axis=0, out=out, mode="clip")
        elif len(self._sources) == 1:
            self._sources[0].fill(self.leaf, row, out)
        else:
            self._fill_segments(row, out)

    def _fill_segments(self, row: Array, out: Array) -> None:
        segment = np.searchsorted(self._first, row, side="right") - 1
        for i in np.unique(segment).tolist():
            mine = segment == i
            part = np.empty((int(mine.sum()), *self.leaf.shape), self.leaf.dtype)
            self._sources[i].fill(self.leaf, row[mine] - self._first[i], part)
            out[mine] = part

    def fetch(self, row: Array, starts: Array) -> PlainRead:
        """Plan the read of rows int64[M] of requests that begin at `starts`."""
        return PlainRead(self, row, starts)


MAX_CODES = 256


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_words(values: Array) -> Array:
    """Return the bits of numbers as unsigned integers, so that NaNs and negative zeros compare like others."""
    return np.ascontiguousarray(values).reshape(-1).view(_WORDS[values.dtype.itemsize])


def has_codes(leaf: Leaf) -> bool:
    """Return whether codes may be smaller than the leaf itself."""
    return leaf.shape == () and leaf.dtype != np.bool_ and 2 <= leaf.dtype.itemsize <= 8


class LeafWriter:
    """Collect the rows of a leaf."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.rows = 0
        self._codes = has_codes(leaf)
        self._palette: Array = np.zeros(0, _WORDS.get(leaf.dtype.itemsize, np.uint8))
        self._order: Array = np.zeros(0, np.int64)  # of the palette, sorted
        self._room: Array = np.empty((0, *leaf.shape), np.uint8 if self._codes else leaf.dtype)

    def append(self, values: Array) -> None:
        """Append `[N, *shape]`."""
        if self._codes:
            words = as_words(values)
            codes = self._codes_of(words)
            if codes is None:
                palette = np.concatenate([self._palette, np.setdiff1d(words, self._palette)])
                if len(palette) > MAX_CODES:
                    self._room = self._palette[self._room[: self.rows]].view(self.leaf.dtype)
                    self._codes = False  # there are too many
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
        """Return the codes of values, if all are in the palette."""
        if not len(self._palette):
            return None
        at = self._order.take(np.searchsorted(self._palette, words, sorter=self._order), mode="clip")
        return at.astype(np.uint8) if (self._palette[at] == words).all() else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        return self._room.nbytes

    def to_arrays(self) -> dict[str, Any]:
        """Return the arrays as a segment stores them."""
        rows = self._room[: self.rows]
        if self.leaf.dtype == np.bool_ and self.leaf.shape == ():
            return {"bits": np.packbits(rows, bitorder="little")}
        if self._codes:
            return {"codes": rows, "palette": self._palette}
        return {"values": rows}
