"""Arrays to save, and how each is cut into blocks.

A block is written, checked and kept between saves as a whole. Blocks of equal size are matched with those of the last save by
position, blocks with keys by key. A source may be larger than memory; `marks` name the blocks that need not be read. `plan`
checks every source before the first file is touched.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fbuf._formats.checkpoint.dtypes import canonical
from fbuf._host.types import Array

BLOCK_BYTES = 1 << 18
MOST_AXES = 32
MOST_BLOCKS = 4096  # of an array that leaves the choice of the block to us


@dataclass(frozen=True)
class Layout:
    """Shape, dtype (little endian) and blocks of an array; one without axes is one block.

    Attributes:
      block: Rows of axis 0 in each block but the last; None: there are `cuts`.
      cuts: First row of each block, and the end.
      keys: What each of them is called.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: int | None = 1
    cuts: tuple[int, ...] | None = None
    keys: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        """Length of axis 0."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one of them."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.rows * self.row_bytes

    @property
    def count(self) -> int:
        """How many blocks there are."""
        if self.keys is not None:
            return len(self.keys)
        assert self.block is not None
        return -(-self.rows // self.block)

    def span(self, index: int) -> tuple[int, int]:
        """First row of a block, and the end."""
        if self.cuts is not None:
            return self.cuts[index], self.cuts[index + 1]
        assert self.block is not None
        return index * self.block, min((index + 1) * self.block, self.rows)

    def key(self, index: int) -> str:
        """What a block is called."""
        return str(index) if self.keys is None else self.keys[index]

    def first(self, row: int) -> int:
        """The block that a row lies in."""
        if self.cuts is None:
            assert self.block is not None
            return row // self.block
        return bisect.bisect_right(self.cuts, row) - 1

    def block_shape(self, index: int) -> tuple[int, ...]:
        """Shape of a block."""
        start, stop = self.span(index)
        return (stop - start, *self.shape[1:]) if self.shape else ()

    @functools.cached_property
    def sizes(self) -> Array:
        """Bytes of each block, int64[count]; not to be written to."""
        if self.cuts is not None:
            return np.diff(np.asarray(self.cuts, np.int64)) * self.row_bytes
        assert self.block is not None
        sizes: Array = np.full(self.count, min(self.block, self.rows) * self.row_bytes, np.int64)
        if self.count:
            start, stop = self.span(self.count - 1)
            sizes[-1] = (stop - start) * self.row_bytes
        return sizes

    def matches(self, other: Layout) -> bool:
        """Whether blocks of the two can be the same."""
        return (self.shape[1:], self.dtype, self.block) == (other.shape[1:], other.dtype, other.block) and (
            len(self.shape) == len(other.shape)
        )


def block_rows(rows: int, row_bytes: int) -> int:
    """Rows of a block where the source does not say: a power of two, some 256 KiB, and no more than 4096 blocks."""
    if not row_bytes:
        return max(rows, 1)
    block = 1 << max(BLOCK_BYTES // row_bytes, 1).bit_length() - 1
    while rows > block * MOST_BLOCKS:
        block *= 2
    return block


MOST_TOTAL = 1 << 19
"""Blocks of a checkpoint: what one manifest, and the header of one file, can name."""


class Source(Protocol):
    """An array, or what reads like one; what it gives must not change while it is saved. It may also have

    - `block: int`, rows of axis 0 in one block;
    - `cuts: Sequence[int]` and `keys: Sequence[str]` in its place: where each block begins, and the end, and what blocks are
      called, so that they are matched with the last save by what they are;
    - `near: bool`: it lies in memory, and any number of its rows is a view;
    - `marks: Sequence[str | None]`, one for each block: the same mark as in the last save means the same bytes, and the block
      is not read. None: not known; it is read and compared.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis 0 is the one that is cut into blocks."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """One of those in `_dtypes.NAMES`, of any byte order."""

    def __getitem__(self, rows: Any, /) -> Any:
        """Rows `[a:b]`; of a source without axes, `[()]`."""


@dataclass(frozen=True)
class Plan:
    """A source whose form was checked."""

    name: str
    source: Source
    layout: Layout
    marks: Sequence[str | None] | None

    def mark(self, index: int) -> str | None:
        """The mark of a block."""
        return None if self.marks is None else self.marks[index]

    @property
    def near(self) -> bool:
        """Whether many blocks may be read at once."""
        return type(self.source) is np.ndarray or getattr(self.source, "near", False) is True

    def read(self, index: int, end: int) -> Array:
        """The bytes of blocks as a contiguous array, little endian; of several where that is `near`.

        Raises:
          ValueError: the source gives something else.
        """
        start, stop = self.layout.span(index)[0], self.layout.span(end - 1)[1]
        value = np.asarray(self.source[start:stop] if self.layout.shape else self.source[()])
        wanted = (stop - start, *self.layout.shape[1:]) if self.layout.shape else ()
        dtype = value.dtype if value.dtype == self.layout.dtype else _canonical(self.name, value.dtype)
        if value.shape != wanted or dtype != self.layout.dtype:
            raise ValueError(
                f"fbuf.save: array '{self.name}' gave {value.dtype}{list(value.shape)} for rows {start} to {stop}; expected "
                f"{self.layout.dtype}{list(wanted)}. A source's slices must be of its own dtype and shape."
            )
        return np.ascontiguousarray(value, self.layout.dtype)


def plan(arrays: Mapping[str, Source]) -> list[Plan]:
    """Checks all sources. Raises TypeError and ValueError, which name the array."""
    plans = [_plan(name, source) for name, source in arrays.items()]
    blocks = sum(plan.layout.count for plan in plans)
    if blocks > MOST_TOTAL:
        raise ValueError(
            f"fbuf.save: there are {blocks} blocks; expected at most {MOST_TOTAL}. Give sources larger blocks."
        )
    return plans


def _plan(name: str, source: Source) -> Plan:
    if type(name) is not str or not name.isprintable():
        raise ValueError(f"fbuf.save: an array has the name {name!r}; expected printable text.")
    if not hasattr(source, "shape") or not hasattr(source, "dtype"):
        raise TypeError(
            f"fbuf.save: array '{name}' is {type(source).__name__}; expected an array. Convert it: numpy.asarray(value)."
        )
    shape, dtype = tuple(int(n) for n in source.shape), _canonical(name, np.dtype(source.dtype))
    if len(shape) > MOST_AXES:
        raise ValueError(f"fbuf.save: array '{name}' has {len(shape)} axes; expected at most {MOST_AXES}. Reshape it.")
    marks: Sequence[str | None] | None = getattr(source, "marks", None)
    cuts: Sequence[int] | None = getattr(source, "cuts", None)
    keys: Sequence[str] | None = getattr(source, "keys", None)
    if cuts is None:
        block = getattr(source, "block", None)
        chosen = block_rows(Layout(shape, dtype).rows, Layout(shape, dtype).row_bytes) if block is None else int(block)
        if not 1 <= chosen < 1 << 48:
            raise ValueError(f"fbuf.save: array '{name}' has blocks of {chosen} rows; expected 1 or more.")
        layout = Layout(shape, dtype, chosen if shape else 1)
    else:
        layout = Layout(shape, dtype, None, tuple(int(c) for c in cuts), tuple(keys or ()))
        _check_cuts(name, layout)
    if marks is not None and len(marks) != layout.count:
        raise ValueError(
            f"fbuf.save: array '{name}' has {len(marks)} marks; expected one for each of its {layout.count} blocks."
        )
    return Plan(name, source, layout, marks)


def _check_cuts(name: str, layout: Layout) -> None:
    cuts, keys = layout.cuts or (), layout.keys or ()
    steps = all(a <= b for a, b in zip(cuts, cuts[1:], strict=False))
    if not layout.shape or len(cuts) != len(keys) + 1 or cuts[0] != 0 or cuts[-1] != layout.rows or not steps:
        raise ValueError(
            f"fbuf.save: array '{name}' of shape {list(layout.shape)} has {len(cuts)} cuts and {len(keys)} keys; expected cuts "
            f"that rise from 0 to its length, one more than keys."
        )
    if len(set(keys)) != len(keys) or not all(type(k) is str and k.isprintable() and k and "#" not in k for k in keys):
        raise ValueError(
            f"fbuf.save: array '{name}' has keys that repeat, or hold '#'; expected another text for each."
        )


def _canonical(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    try:
        return canonical(dtype)
    except TypeError:
        raise TypeError(
            f"fbuf.save: array '{name}' is {dtype}; expected numbers or booleans. Text and objects are saved encoded, as uint8."
        ) from None
