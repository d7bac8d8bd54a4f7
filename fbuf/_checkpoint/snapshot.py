"""A source whose changed blocks were copied, so that it can be written when the state is long gone.

What the last save has already, by its marks, is not copied, and cannot be read from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fbuf._checkpoint import block_hash
from fbuf._checkpoint.device_arrays import SMALL, rows_of_block


class Held:
    """A source, copied as far as `last` (that array in the last save, or None) lacks it."""

    def __init__(self, name: str, source: Any, last: Any):
        self._name = name
        self.shape, self.dtype = tuple(source.shape), np.dtype(source.dtype)
        self.cuts: Sequence[int] | None = getattr(source, "cuts", None)
        self.keys: Sequence[str] | None = getattr(source, "keys", None)
        if self.cuts is None:
            self.block = getattr(source, "block", None) or rows_of_block(self.shape, self.dtype.itemsize)
            rows = self.shape[0]
            starts = [*range(0, rows, self.block), rows]
        else:
            starts = list(self.cuts)
        spans = self._spans = list(zip(starts, starts[1:], strict=False))
        marks: Sequence[str | None] | None = getattr(source, "marks", None)
        known = _known(self, last)
        large = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize > SMALL
        if marks is None and large and known:
            marks = [block_hash.of_bytes(source[a:b]) for a, b in spans]
        self._pieces: dict[tuple[int, int], np.ndarray] = {}
        self._marks, self._large = marks, large
        for i, (a, b) in enumerate(spans):
            mark = None if marks is None else marks[i]
            if mark is None or known.get(i if self.keys is None else self.keys[i]) != (mark, b - a):
                self._pieces[a, b] = np.array(source[a:b])  # a copy: what it came from may be donated

    @property
    def nbytes(self) -> int:
        """Bytes copied."""
        return sum(piece.nbytes for piece in self._pieces.values())

    @property
    def marks(self) -> Sequence[str | None] | None:
        """Of each block. Where nobody knew any, all were copied, and are looked at now."""
        if self._marks is None and self._large:
            self._marks = [block_hash.of_bytes(self._pieces[span]) for span in self._spans]
        return self._marks

    def __getitem__(self, at: slice) -> np.ndarray:
        start, stop, _ = at.indices(self.shape[0])
        piece = self._pieces.get((start, stop))
        if piece is None:
            raise RuntimeError(
                f"fbuf.save: rows {start} to {stop} of array '{self._name}' had not changed since the last save, and were not "
                f"copied; but what that save wrote is damaged, or another process has saved since. Save once with wait=True."
            )
        return piece


def _known(held: Held, last: Any) -> dict[Any, tuple[str, int]]:
    """Mark and rows of each block of the last save, by number or key, where its blocks can be taken for these."""
    marks = None if last is None else getattr(last, "marks", None)
    same = last is not None and last.dtype == held.dtype and last.shape[1:] == held.shape[1:]
    if marks is None or not same or (last.keys is None) != (held.keys is None):
        return {}
    if held.keys is None:
        if last.block != held.block:
            return {}
        starts = [*range(0, last.shape[0], last.block), last.shape[0]]
        names: Sequence[Any] = range(len(starts) - 1)
    else:
        starts, names = list(last.cuts), last.keys
    return {names[i]: (mark, starts[i + 1] - starts[i]) for i, mark in enumerate(marks) if mark is not None}
