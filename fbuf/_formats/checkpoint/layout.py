"""Arrays to save, and how each is cut into blocks.

A block is written, checked and kept between saves as a whole. Blocks of equal size are matched with those of the last save by
position, blocks with keys by key. A source may be larger than memory; `marks` name the blocks that need not be read. `plan`
checks every source before the first file is touched.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.dtypes import canonical
from fbuf._host.memory.lazy_array import Source, block_rows
from fbuf._host.types import Array

MAX_AXES = 32


@dataclass(frozen=True)
class Layout:
    """Shape, little-endian dtype and blocks of an array; an array without axes is one block.

    Attributes:
      block: Rows of axis 0 in each block but the last; None: `cuts` are given.
      cuts: First row of each block, and the end.
      keys: Name of each of these blocks.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int | None = 1
    cuts: tuple[int, ...] | None = None
    keys: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        """Return the length of axis 0."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        if self.keys is not None:
            return len(self.keys)
        assert self.block is not None
        return -(-self.rows // self.block)

    @functools.cached_property
    def bounds(self) -> list[int]:
        """The first row of each block, and the end; read only."""
        if self.cuts is not None:
            return list(self.cuts)
        assert self.block is not None
        return [*range(0, self.rows, self.block), self.rows]

    def block_span(self, index: int) -> tuple[int, int]:
        """Return the first row of a block, and the end."""
        return self.bounds[index], self.bounds[index + 1]

    def block_key(self, index: int) -> str:
        """Return the key of a block."""
        return str(index) if self.keys is None else self.keys[index]

    def block_of_row(self, row: int) -> int:
        """Return the block that contains a row."""
        return bisect.bisect_right(self.bounds, row) - 1

    def block_shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a block."""
        start, stop = self.block_span(index)
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @functools.cached_property
    def sizes(self) -> Array:
        """Bytes of each block, int64[num_blocks]; read only."""
        return np.diff(np.array(self.bounds, np.int64)) * self.row_bytes

    def matches(self, other: Layout) -> bool:
        """Return whether blocks of the two layouts can be equal."""
        return (self.shape[1:], self.dtype, self.block) == (other.shape[1:], other.dtype, other.block) and (
            len(self.shape) == len(other.shape)
        )


MAX_TOTAL_BLOCKS = 1 << 19
"""Blocks of a checkpoint, so that one manifest and one file's header can name them."""


@dataclass(frozen=True)
class Plan:
    """A checked source."""

    name: str
    source: Source
    layout: Layout
    marks: list[str | None] | None

    @property
    def slices_are_views(self) -> bool:
        """Return whether several blocks may be read at once: slices of the source are views."""
        return self.layout.cuts is None and (
            type(self.source) is np.ndarray or getattr(self.source, "slices_are_views", False)
        )

    def read(self, index: int, end: int) -> Array:
        """Return blocks `index` to `end` as a contiguous little-endian array.

        Raises:
          ValueError: the source returns another dtype or shape.
        """
        start, stop = self.layout.block_span(index)[0], self.layout.block_span(end - 1)[1]
        value = np.asarray(self.source[start:stop] if self.layout.shape else self.source[()])
        wanted = (stop - start, *self.layout.shape[1:]) if self.layout.shape else ()
        dtype = value.dtype if value.dtype == self.layout.dtype else _checked_dtype(self.name, value.dtype)
        if value.shape != wanted or dtype != self.layout.dtype:
            raise ValueError(
                f"fbuf.save: array '{self.name}' gave {value.dtype}{list(value.shape)} for rows {start} to {stop}; expected "
                f"{self.layout.dtype}{list(wanted)}. Return slices of the source's own dtype and shape."
            )
        return np.ascontiguousarray(value, self.layout.dtype)


def plan(arrays: Mapping[str, Source]) -> list[Plan]:
    """Check all sources. Raises TypeError and ValueError, which name the array."""
    plans = [_plan(name, source) for name, source in arrays.items()]
    blocks = sum(plan.layout.num_blocks for plan in plans)
    if blocks > MAX_TOTAL_BLOCKS:
        raise ValueError(f"fbuf.save: {blocks} blocks; expected at most {MAX_TOTAL_BLOCKS}. Use larger blocks.")
    return plans


def _plan(name: str, source: Source) -> Plan:
    if type(name) is not str or not name.isprintable():
        raise ValueError(f"fbuf.save: an array has the name {name!r}; expected printable text.")
    if not hasattr(source, "shape") or not hasattr(source, "dtype"):
        raise TypeError(f"fbuf.save: array '{name}' is {type(source).__name__}; expected an array. Use numpy.asarray.")
    shape, dtype = tuple(int(n) for n in source.shape), _checked_dtype(name, np.dtype(source.dtype))
    if len(shape) > MAX_AXES:
        raise ValueError(f"fbuf.save: array '{name}' has {len(shape)} axes; expected at most {MAX_AXES}. Reshape it.")
    marks: Sequence[str | None] | None = getattr(source, "marks", None)
    cuts: Sequence[int] | None = getattr(source, "cuts", None)
    if cuts is None:
        block, whole = getattr(source, "block", None), Layout(shape, dtype)
        block = block_rows(whole.rows, whole.row_bytes) if block is None else int(block)
        if not 1 <= block < 1 << 48:
            raise ValueError(f"fbuf.save: array '{name}' has blocks of {block} rows; expected 1 or more.")
        layout = Layout(shape, dtype, block if shape else 1)
    else:
        layout = Layout(shape, dtype, None, tuple(map(int, cuts)), tuple(getattr(source, "keys", None) or ()))
        _check_cuts(name, layout)
    if marks is not None and len(marks) != layout.num_blocks:
        raise ValueError(f"fbuf.save: array '{name}' has {len(marks)} marks; expected {layout.num_blocks}.")
    return Plan(name, source, layout, None if marks is None else list(marks))


def _check_cuts(name: str, layout: Layout) -> None:
    cuts, keys = layout.cuts or (), layout.keys or ()
    rise = all(a <= b for a, b in itertools.pairwise(cuts))
    if not layout.shape or len(cuts) != len(keys) + 1 or cuts[0] != 0 or cuts[-1] != layout.rows or not rise:
        raise ValueError(f"fbuf.save: array '{name}', {list(layout.shape)}, has cuts {cuts} for {len(keys)} keys.")
    if len(set(keys)) != len(keys) or not all(type(k) is str and k.isprintable() and k and "#" not in k for k in keys):
        raise ValueError(f"fbuf.save: array '{name}' has keys that repeat or contain '#'; expected distinct texts.")


def _checked_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    try:
        return canonical(dtype)
    except TypeError:
        raise TypeError(f"fbuf.save: array '{name}' is {dtype}; expected numbers or booleans.") from None
