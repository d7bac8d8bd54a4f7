"""Describe a host column, and check the arrays of a call against the columns before anything is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fbuf._host.codecs.codec import BitPack, Codec, Raw, Zstd
from fbuf._host.types import Array


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
        if self.dtype.hasobject:
            raise TypeError(
                f"Column: column '{self.name}' is {self.dtype}; expected numbers or booleans. "
                f"Keep Python objects in a list of your own."
            )
        if isinstance(self.codec, Raw):
            object.__setattr__(self, "codec", None)
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(
                f"Column: codec of '{self.name}' is {self.codec!r}; expected a value with chunk, encode and decode. "
                f"Use Zstd()."
            )
        if self.codec is not None and self.codec.chunk < 1:
            raise ValueError(
                f"Column: codec of '{self.name}' has chunk {self.codec.chunk}; expected 1 or more. Use Zstd(chunk=8)."
            )

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
        raise ValueError(
            f"Column: codec of '{column.name}' has chunk {codec.chunk}, but with a writer that replaces any row no rows stay "
            f"together; expected 1. Use {type(codec).__name__}(chunk=1)."
        )
    return replace(column, codec=replace(codec, chunk=1))


def check_rows(columns: Sequence[Column], lanes: int, rows: Sequence[Array], keep: Array | None) -> Array | None:
    """Check what `Store.write` takes: `[N, E, *shape]` a column and bool[N, E]. Returns None for a `keep` that keeps all."""
    if len(rows) != len(columns):
        raise ValueError(
            f"Store.write: rows has {len(rows)} arrays; expected {len(columns)}, one a column. "
            f"Pass [{', '.join(c.name for c in columns)}]."
        )
    n = np.shape(rows[0])[0] if np.ndim(rows[0]) else 0
    for column, array in zip(columns, rows, strict=True):
        check("Store.write", f"column '{column.name}'", array, column.dtype, (n, lanes, *column.shape))
    if keep is None:
        return None
    check("Store.write", "keep", keep, np.dtype(bool), (n, lanes))
    return None if keep.all() else keep


def check_slots(slots: Array | None, keep: Array | None, shape: tuple[int, int], capacity: int) -> Array | None:
    """Return which rows are kept: those with a slot from 0 to `capacity` - 1; None for all."""
    if slots is None:
        raise ValueError(
            "Store.write: slots is None, but rows replace slots; expected int32[N, E]. Pass the slot of each row."
        )
    check("Store.write", "slots", slots, np.dtype(np.int32), shape)
    inside = (slots >= 0) & (slots < capacity)
    inside = inside if keep is None else inside & keep
    return None if inside.all() else inside


def check_request(columns: Sequence[Column], index: int, tickets: Array, out: Array) -> None:
    """Check one request of `Store.read`."""
    column = column_at("Store.read", columns, index)
    check("Store.read", "tickets", tickets, np.dtype(np.uint64), tickets.shape)
    check("Store.read", f"out of '{column.name}'", out, column.dtype, (*tickets.shape, *column.shape))
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ValueError(
            f"Store.read: out of '{column.name}' is strided or read-only; expected a C-contiguous writeable array. "
            f"Allocate it with np.empty({tuple(out.shape)}, {column.dtype.name!r})."
        )


def check_patch(columns: Sequence[Column], tickets: Array, keep: Array, fields: Mapping[int, Array]) -> None:
    """Check what `Store.patch` takes."""
    check("Store.patch", "tickets", tickets, np.dtype(np.uint64), tickets.shape[:1])
    check("Store.patch", "keep", keep, np.dtype(bool), tickets.shape)
    for index, values in fields.items():
        column = column_at("Store.patch", columns, index)
        check("Store.patch", f"column '{column.name}'", values, column.dtype, (len(tickets), *column.shape))


def column_at(call: str, columns: Sequence[Column], index: int) -> Column:
    """Return a column by number."""
    if not 0 <= index < len(columns):
        raise ValueError(
            f"{call}: column is {index}; expected 0 to {len(columns) - 1}. Columns are {[c.name for c in columns]}."
        )
    return columns[index]


def check(call: str, what: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Check one array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{call}: {what} is {type(array).__name__}; expected a numpy array. Convert with np.asarray(x)."
        )
    if array.dtype != dtype:
        raise TypeError(f"{call}: {what} is {array.dtype}; expected {dtype}. Cast with x.astype({dtype.name!r}).")
    if array.shape != shape:
        raise ValueError(
            f"{call}: {what} has shape {list(array.shape)}; expected {list(shape)}. "
            f"Give it that shape with x.reshape({list(shape)})."
        )
