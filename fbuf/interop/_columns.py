"""Columns by the names and dtypes they are to have here. No value changes unless the user asked for the cast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fbuf.interop._source import DTYPES, Column, check_name, refused

BLOCK_BYTES = 8 * 2**20

Block = Mapping[str, np.ndarray]
"""Rows: `{leaf: [n, ...]}`."""
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
NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""What JAX holds in place of 64 bits, by default."""


def column_of(name: str, value: Any, lanes: int | None = None) -> Column:
    """Return the column of an array `[N, ...]`, with lanes `[N, E, ...]`, or of what slices like one."""
    try:
        array = value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
    except ValueError as error:
        return refused(f"leaf '{name}' is not an array ({error}); expected [N, ...].")
    shape, lead = tuple(array.shape), 1 if lanes is None else 2
    if len(shape) < lead or (lanes is not None and shape[1] != lanes):
        what = f"has shape {list(shape)}" if shape else "is a scalar, of shape []"
        return refused(f"leaf '{name}' {what}; expected [N, {'' if lanes is None else f'{lanes}, '}...].")
    dtype = DTYPES.get(getattr(array.dtype, "name", ""))
    if dtype is None or dtype != array.dtype:
        return refused(f"leaf '{name}' is {array.dtype}; expected plain numbers, or booleans.{_remedy(array)}")
    return Column(shape[lead:], dtype, lambda first, last: np.asarray(array[first:last]), shape[0])


def _remedy(array: Any) -> str:
    if type(array).__module__.partition(".")[0] == "torch":
        return " Give x.numpy()."
    if isinstance(array.dtype, np.dtype) and array.dtype.kind in "iufc":  # of the other byte order
        return f" Give x.astype('{array.dtype.name}')."
    return ""


def chosen(
    call: str, columns: Mapping[str, Column], fields: Fields, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return `{name there: name here}` of the leaves to take.

    Args:
      known: First parts of names that are called something else here, unless `fields` is a mapping.
    Raises:
      ValueError: a field is missing, cannot be read or has an invalid name; or two leaves would have one name.
    """
    if fields == "ted":
        fields = {name: here for name, here in TED.items() if name in columns or name != "next/truncated"}
    elif isinstance(fields, str):
        raise TypeError(
            f'{call}: fields is {fields!r}; expected a dict, a sequence of names, "ted" or None. '
            f"Write fields=({fields!r},)."
        )
    if not isinstance(fields, Mapping):
        fields = {name: _renamed(name, known or {}) for name in (columns if fields is None else fields)}
    taken: dict[str, str] = {}
    for there, here in ((_joined(there), _joined(here)) for there, here in fields.items()):
        if there not in columns:
            names = ", ".join(columns) or "none"
            raise ValueError(f"{call}: fields has '{there}', which is not there; expected some of: {names}.")
        if columns[there].refused:
            rest = [name for name, column in columns.items() if not column.refused]
            leave_out = f" Leave it out: fields={rest}." if rest else ""
            raise ValueError(f"{call}: {columns[there].refused}{leave_out}")
        taken[there] = here if here == there else check_name(call, here)
    _check_distinct(call, taken)
    return taken


def _joined(name: str | Sequence[str]) -> str:
    return name if isinstance(name, str) else "/".join(name)


def _renamed(name: str | Sequence[str], known: Mapping[str, str]) -> str:
    first, slash, rest = _joined(name).partition("/")
    return known.get(first, first) + slash + rest


def _check_distinct(call: str, taken: Mapping[str, str]) -> None:
    by_name: dict[str, str] = {}
    for there, here in taken.items():
        clash = next(
            (name for name in by_name if f"{name}/".startswith(f"{here}/") or here.startswith(f"{name}/")), None
        )
        if clash is not None:
            rest = {t: h for t, h in taken.items() if t != there}
            raise ValueError(
                f"{call}: '{by_name[clash]}' and '{there}' would be the leaves '{clash}' and '{here}'; expected other names. "
                f"Name them, or leave one out: fields={rest}."
            )
        by_name[here] = there


def length_of(call: str, columns: Mapping[str, Column]) -> int:
    """Return the number of rows, of which all columns must have as many."""
    lengths = {name: column.rows for name, column in columns.items()}
    rows = max(lengths.values(), key=lambda n: sum(n == m for m in lengths.values()), default=0)
    fitting = [name for name, n in lengths.items() if n == rows]
    odd = next((name for name, n in lengths.items() if n != rows), None)
    if odd is not None:
        raise ValueError(
            f"{call}: leaf '{odd}' has {lengths[odd]} rows, but '{fitting[0]}' has {rows}; expected as many. Cut them to the "
            f"same length, or leave it out: fields={fitting}."
        )
    return rows


def converted(call: str, columns: Mapping[str, Column], dtypes: Mapping[str, str] | None) -> dict[str, Column]:
    """Return the columns, by their names here, in the dtypes asked for, or as JAX can hold them."""
    if not columns:
        raise ValueError(f"{call}: there are no leaves; expected at least one.")
    if unknown := [name for name in dtypes or () if name not in columns]:
        raise ValueError(
            f"{call}: dtypes has '{unknown[0]}', but leaves are {', '.join(columns)} (as they are called here)."
        )
    return {name: _cast(call, name, column, (dtypes or {}).get(name)) for name, column in columns.items()}


def _cast(call: str, name: str, column: Column, wanted: str | None) -> Column:
    came, wide = column.dtype, jax.config.read("jax_enable_x64")
    exact = wanted is None
    if wanted is None:
        if came.name not in NARROW or wide:
            return column
        wanted = NARROW[came.name]
        if came.kind in "fc":
            raise TypeError(
                f"{call}: leaf '{name}' is {came.name}; JAX holds {wanted} unless jax_enable_x64 is on. "
                f"Say that it may be rounded: dtypes={{'{name}': '{wanted}'}}."
            )
    to = DTYPES.get(wanted if isinstance(wanted, str) else np.dtype(wanted).name)
    if to is None or (to.name in NARROW and not wide):
        usable = [n for n in DTYPES if wide or n not in NARROW]
        raise TypeError(f"{call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(usable)}.")
    if to == came:
        return column

    def read(first: int, last: int) -> np.ndarray:
        rows = column.read(first, last)
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if exact or to.kind in "iub":
            lost = not np.array_equal(cast.astype(came), rows)
        else:
            lost = came.kind == to.kind == "f" and bool((np.isinf(cast) & ~np.isinf(rows)).any())
        if lost:
            other = "float32" if came.kind in "iub" else came.name
            raise ValueError(
                f"{call}: leaf '{name}' is {came.name}, and rows {first} to {last - 1} hold values that {to.name} cannot. "
                f"Turn jax_enable_x64 on, or say what they are to become: dtypes={{'{name}': '{other}'}}."
            )
        return cast

    return dataclasses.replace(column, dtype=to, read=read)


def without_last_axes(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return columns of torchrl's layout, with scalars of shape [] where they are [1] there."""

    def squeezed(column: Column) -> Column:
        return dataclasses.replace(column, shape=column.shape[:-1], read=lambda a, b: column.read(a, b)[..., 0])

    one = {name for name, column in columns.items() if name in _TED_SCALARS and column.shape[-1:] == (1,)}
    return {name: squeezed(column) if name in one else column for name, column in columns.items()}


def rows_a_block(leaves: Iterable[Any], lanes: int | None = None) -> int:
    """Return the number of rows (a lane) that make a block of 8 MiB, of leaves with a shape and a dtype."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) * (lanes or 1)
    return max(1, BLOCK_BYTES // max(1, size))


def blocks(
    call: str, columns: Mapping[str, Column], first: int, last: int, size: int, lanes: tuple[int, ...] = ()
) -> Iterator[Block]:
    """Read rows from the first to before the last in blocks, checked against what the columns say of themselves."""
    for start in range(first, last, size):
        stop = min(start + size, last)
        block = {}
        for name, column in columns.items():
            rows = block[name] = column.read(start, stop)
            expected = (stop - start, *lanes, *column.shape)
            if rows.shape != expected or rows.dtype != column.dtype:
                raise ValueError(
                    f"{call}: rows {start} to {stop - 1} of '{name}' came as {rows.dtype}{list(rows.shape)}; expected "
                    f"{column.dtype}{list(expected)}. The source changed while it was read, or is damaged."
                )
        yield block
