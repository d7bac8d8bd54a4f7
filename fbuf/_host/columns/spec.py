"""Describe a leaf that is kept on the host: its shape, dtype and codec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fbuf._host.codecs import BitPack, Codec, Raw, Zstd


@dataclass(frozen=True)
class Column:
    """One leaf kept on the host."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: Codec | None  # None: as it is, in a ring
    stacks: bool = False  # whether rows that are stacks of frames are recognised
    settled: bool = False  # rows stay encoded even where that gains little

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        if isinstance(self.codec, Raw):
            object.__setattr__(self, "codec", None)
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(f"codec of '{self.name}' is {self.codec!r}; expected chunk, encode and decode. Use Zstd().")
        if self.codec is not None and self.codec.chunk < 1:
            raise ValueError(f"Column: codec of '{self.name}' has chunk {self.codec.chunk}; expected 1 or more.")

    @property
    def nbytes(self) -> int:
        """Return the bytes of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def one_by_one(column: Column) -> Column:
    """Return the column for rows in any order, which cannot be encoded together.

    Raises:
      ValueError: a codec of the user's wants several.
    """
    codec, column = column.codec, replace(column, stacks=False)
    if isinstance(codec, Zstd):
        return replace(column, codec=replace(codec, chunk=1, repack=False))
    if codec is None or codec.chunk == 1:
        return column
    if not isinstance(codec, BitPack):
        raise ValueError(f"Column: '{column.name}' needs {type(codec).__name__}(chunk=1), as any row is replaced.")
    return replace(column, codec=replace(codec, chunk=1))
