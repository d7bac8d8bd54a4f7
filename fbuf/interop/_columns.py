"""Columns by the names and dtypes they are to have here. Nothing is cast that nobody asked for, unless no value can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from fbuf.interop._source import DTYPES, Column, Source

Fields = Mapping[str, str] | Sequence[str] | str | None
"""Which leaves to take: `{name there: name here}`, names, "ted" (see `TED`), or None: all."""

TED = {
    "observation": "obs",
    "action": "action",
    "next/reward": "reward",
    "next/terminated": "terminated",
    "next/truncated": "truncated",
}
"""What `fields="ted"` takes of torchrl's layout: each observation once; `next/observation` is that of the next row."""
_TED_SCALARS = ("reward", "terminated", "truncated")  # `[N, 1]` there, `[N]` here
_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def chosen(call: str, source: Source, fields: Fields) -> dict[str, Column]:
    """The columns to take, by their names here.

    Raises:
      ValueError: one is not in the source, cannot be read, or two get the same name.
    """
    there = ", ".join(source.columns) or "none"
    squeezed: tuple[str, ...] = ()
    if isinstance(fields, str):
        if fields != "ted":
            raise ValueError(f'{call}: fields is {fields!r}; expected a dict, a sequence of names, "ted" or None.')
        squeezed = _TED_SCALARS
        fields = {name: here for name, here in TED.items() if name in source.columns or name != "next/truncated"}
    if fields is None:
        fields = {name: name for name in source.columns}
    elif not isinstance(fields, Mapping):
        fields = {name: name for name in fields}
    out: dict[str, Column] = {}
    for name, here in fields.items():
        name, here = (x if isinstance(x, str) else "/".join(x) for x in (name, here))
        if name not in source.columns:
            raise ValueError(f"{call}: fields has '{name}', which is not there; expected some of: {there}.")
        column = source.columns[name]
        if column.refused:
            rest = [n for n, c in source.columns.items() if not c.refused]
            raise ValueError(f"{call}: {column.refused} Leave it out: fields={rest}.")
        if here in out:
            raise ValueError(
                f"{call}: fields gives two leaves the name '{here}'. Rename one: fields={{'{name}': ...}}."
            )
        out[here] = _squeezed(column) if here in squeezed else column
    return out


def _squeezed(column: Column) -> Column:
    """Without its last axis, if that is 1."""
    if column.shape[-1:] != (1,):
        return column
    return dataclasses.replace(column, shape=column.shape[:-1], read=lambda a, b: column.read(a, b)[..., 0])


def cast(call: str, name: str, column: Column, wanted: str | None) -> Column:
    """The column in the dtype asked for, or as JAX can hold it; what would change a value raises when it comes."""
    came, wide = column.dtype, jax.config.read("jax_enable_x64")
    exact = wanted is None
    if wanted is None:
        if came.name not in _NARROW or wide:
            return column
        wanted = _NARROW[came.name]
        if came.kind in "fc":
            raise TypeError(
                f"{call}: leaf '{name}' is {came.name}; JAX holds {wanted} unless jax_enable_x64 is on. "
                f"Say that it may be rounded: dtypes={{'{name}': '{wanted}'}}."
            )
    to = DTYPES.get(wanted if isinstance(wanted, str) else np.dtype(wanted).name)
    if to is None or (to.name in _NARROW and not wide):
        usable = [n for n in DTYPES if wide or n not in _NARROW]
        raise TypeError(f"{call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(usable)}.")

    def read(first: int, last: int) -> np.ndarray:
        rows = column.read(first, last)
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if (exact or to.kind in "iub") and not np.array_equal(cast.astype(came), rows):
            raise ValueError(
                f"{call}: leaf '{name}' is {came.name}, and rows {first} to {last - 1} hold values that {to.name} cannot. "
                f"Turn jax_enable_x64 on, or say what they are to become: dtypes={{'{name}': 'float32'}}."
            )
        return cast

    return dataclasses.replace(column, dtype=to, read=read)


def block_of(call: str, name: str, column: Column, first: int, last: int, lanes: tuple[int, ...]) -> np.ndarray:
    """Rows from the first to before the last, checked against what the column says of itself."""
    rows = column.read(first, last)
    expected = (last - first, *lanes, *column.shape)
    if rows.shape != expected or rows.dtype != column.dtype:
        raise ValueError(
            f"{call}: rows {first} to {last - 1} of '{name}' came as {rows.dtype}{list(rows.shape)}; expected "
            f"{column.dtype}{list(expected)}. The source changed while it was read, or is damaged."
        )
    return rows
