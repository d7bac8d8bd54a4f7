"""How one array is cut into blocks: at multiples of a number of rows, or at cuts of its own with keys for names.

A block is what is written, checked and kept between saves as a whole. Blocks at multiples are matched with those of the last
save by place, blocks with keys by key, so that the first may go without all others shifting.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

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
