"""Columns: the leaves of a source in order of time, read block by block, by their names and dtypes here.

Every format becomes columns (`interop._source.Source`), so names, dtypes and lengths are checked once. No value changes unless
the caller asked for a cast.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core.pytree import is_under, name_of, named_leaves, under
from fbuf.torch._dtypes import NARROW
from fbuf.torch._tensordict import TED

MOST_JSON = 64 * 2**20  # bytes
MOST_DEPTH = 64  # folders

_EXTENDED = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu int2 uint2 int4 uint4"
).split()
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128".split()
    )
} | {name: np.dtype(getattr(jnp, name)) for name in _EXTENDED if hasattr(jnp, name)}
"""Every dtype that a file may name, by its name. A closed table: nothing in a file is looked up anywhere else."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One leaf of all rows.

    Attributes:
      shape: Of one row (of one lane).
      dtype: In the source.
      read: Return rows from the first to before the second number, `[n, ...]`, with lanes `[n, E, ...]`; called in ascending
        order.
      rows: Number of rows; -1 if the source states it for all columns.
      refused: Why the column cannot be read, raised on request; "" if it can.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], np.ndarray]
    rows: int = -1
    refused: str = ""


def refused(why: str) -> Column:
    """Return a column that cannot be read."""

    def read(first: int, last: int) -> np.ndarray:
        raise ValueError(why)

    return Column((), np.dtype(bool), read, refused=why)


def check_name(where: str, name: str) -> str:
    """Return the name of a leaf from a file, which could be a path to elsewhere.

    Raises:
      ValueError: it has an empty part, `.`, `..`, a backslash or a NUL.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ValueError(f"{where}: leaf {name[:80]!r} has an invalid name; expected one such as 'next/obs'.")
    return name


def check_count(where: str, what: str, value: Any) -> int:
    """Return a count from a file. Raises ValueError unless it is an int from 0 to 2^62."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{where}: {what} is {str(value)[:80]!r}; expected an int >= 0. The file is damaged.")
    return value


def check_shape(where: str, value: Any) -> tuple[int, ...]:
    """Return a shape from a file. Raises ValueError unless it is at most 32 ints whose product is below 2^62."""
    if not isinstance(value, (list, tuple)) or len(value) > 32:
        raise ValueError(f"{where}: shape is {str(value)[:80]!r}; expected up to 32 ints. The file is damaged.")
    shape = tuple(check_count(where, "an axis", n) for n in value)
    if math.prod(shape) >= 2**62:
        raise ValueError(f"{where}: shape is {shape}; expected fewer than 2^62 entries. The file is damaged.")
    return shape


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
      ValueError: it is larger than 64 MiB, nested too deep, not JSON or not an object.
      FileNotFoundError: it is missing.
    """
    size = path.stat().st_size
    if size > MOST_JSON:
        raise ValueError(f"{path}: has {size} bytes; expected at most {MOST_JSON}.")
    try:
        value = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: is not valid JSON ({error}). The file is damaged.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is a {type(value).__name__}; expected an object. It is damaged.")
    return value


BLOCK_BYTES = 8 * 2**20


def array_column(array: np.ndarray, shape: tuple[int, ...] = ()) -> Column:
    """Return the column of an array in memory, whose rows (of a lane) have this shape."""
    return Column(shape, array.dtype, lambda first, last: array[first:last], len(array))


def flag(function: Callable[..., np.ndarray], *columns: Column) -> Column:
    """Return a flag that is a function of others; `np.greater` is the first and not the second."""
    rows = columns[0].rows
    return Column((), np.dtype(bool), lambda i, j: function(*(column.read(i, j) != 0 for column in columns)), rows)


Block = Mapping[str, np.ndarray]
"""Rows: `{leaf: [n, ...]}`."""
Fields = Mapping[str, str] | Sequence[str] | str | None
"""Which leaves to take: `{name there: name here}`, names, "ted" (see `TED`), or None: all."""

_TED_SCALARS = ("reward", "terminated", "truncated")  # `[N, 1]` there, `[N]` here


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
        fix = ""
        if type(array).__module__.partition(".")[0] == "torch":
            fix = " Pass x.numpy()."
        elif isinstance(array.dtype, np.dtype) and array.dtype.kind in "iufc":  # the other byte order
            fix = f" Pass x.astype('{array.dtype.name}')."
        return refused(f"leaf '{name}' is {array.dtype}; expected plain numbers, or booleans.{fix}")
    return Column(shape[lead:], dtype, lambda first, last: np.asarray(array[first:last]), shape[0])


def columns_of(call: str, data: Mapping[str, Any], lanes: int | None = None, prefix: str = "") -> dict[str, Column]:
    """Return the leaves of nested dicts of arrays, or of lists of numbers."""
    out: dict[str, Column] = {}
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{call}: a dict has the key {key!r}; expected the name of a leaf.")
        name = check_name(call, prefix + key)
        if isinstance(value, Mapping):
            found = columns_of(call, value, lanes, name + "/")
        elif isinstance(value, (list, str, bytes)) or hasattr(value, "dtype") or tree_is_leaf(value):
            found = {name: column_of(name, value, lanes)}
        else:  # another pytree
            leaves = named_leaves(value).items()
            found = {
                full: column_of(full, leaf, lanes) for leaf_name, leaf in leaves for full in [f"{name}/{leaf_name}"]
            }
        if twice := [leaf for leaf in found if leaf in out]:
            raise ValueError(f"{call}: two leaves have the name '{twice[0]}'. Rename one, or leave it out.")
        out |= found
    return out


def tree_is_leaf(value: Any) -> bool:
    """Whether a value is no pytree of others."""
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(value))


def choose_leaves(
    call: str, columns: Mapping[str, Column], fields: Fields, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return `{name there: name here}` of the leaves to take.

    Args:
      known: First parts of names and their names here, unless `fields` is a mapping.
    Raises:
      ValueError: a field is missing, cannot be read or has an invalid name; or two leaves would have one name.
    """
    if fields == "ted":
        fields = {name: here for name, here in TED.items() if name in columns or name != "next/truncated"}
    elif isinstance(fields, str):
        raise TypeError(f'{call}: fields is {fields!r}; expected a dict, a sequence of names, "ted" or None.')
    if not isinstance(fields, Mapping):
        fields = {name: renamed(name_of(name), known or {}) for name in (columns if fields is None else fields)}
    chosen: dict[str, str] = {}
    for source, here in ((name_of(source), name_of(here)) for source, here in fields.items()):
        if source not in columns:
            names = ", ".join(columns) or "none"
            raise ValueError(f"{call}: fields has '{source}', which is missing; expected some of: {names}.")
        if columns[source].refused:
            rest = [name for name, column in columns.items() if not column.refused]
            leave_out = f" Leave it out: fields={rest}." if rest else ""
            raise ValueError(f"{call}: {columns[source].refused}{leave_out}")
        for other, name in chosen.items():
            if under(here, [name]) or under(name, [here]):
                raise ValueError(
                    f"{call}: '{other}' and '{source}' would be '{name}' and '{here}'. Leave one out: fields={chosen}."
                )
        chosen[source] = here if here == source else check_name(call, here)
    return chosen


def renamed(name: str, known: Mapping[str, str]) -> str:
    """Return a name with its first part as it is here."""
    first, slash, rest = name.partition("/")
    return known.get(first, first) + slash + rest


def row_count(call: str, columns: Mapping[str, Column]) -> int:
    """Return the number of rows. Raises ValueError unless all columns have it."""
    lengths = {name: column.rows for name, column in columns.items()}
    rows = statistics.mode(lengths.values()) if lengths else 0
    fitting = [name for name, n in lengths.items() if n == rows]
    for name, n in lengths.items():
        if n != rows:
            raise ValueError(f"{call}: leaf '{name}' has {n} rows; expected {rows}. Leave it out: fields={fitting}.")
    return rows


def cast_columns(
    call: str, columns: Mapping[str, Column], dtypes: Mapping[str, str] | None, exact: Sequence[str] = ()
) -> dict[str, Column]:
    """Return the columns, by their names here, in the dtypes asked for, or in those that JAX can hold.

    Leaves and subtrees in `exact` keep 64 bits.
    """
    if not columns:
        raise ValueError(f"{call}: there are no leaves; expected at least one.")
    if unknown := [name for name in dtypes or () if name not in columns]:
        raise ValueError(f"{call}: dtypes has '{unknown[0]}', but leaves are {', '.join(columns)}.")
    all_exact = jax.config.read("jax_enable_x64")
    return {
        name: _cast(call, name, column, (dtypes or {}).get(name), all_exact or is_under(name, exact))
        for name, column in columns.items()
    }


def _cast(call: str, name: str, column: Column, wanted: str | None, x64: bool) -> Column:
    dtype = column.dtype
    exact = wanted is None
    if wanted is None:
        if dtype.name not in NARROW or x64:
            return column
        wanted = NARROW[dtype.name]
        if dtype.kind in "fc":
            raise TypeError(
                f"{call}: leaf '{name}' is {dtype.name}. Enable x64, or round: dtypes={{'{name}': '{wanted}'}}."
            )
    to = DTYPES.get(wanted if isinstance(wanted, str) else np.dtype(wanted).name)
    if to is None or (to.name in NARROW and not x64):
        usable = [n for n in DTYPES if x64 or n not in NARROW]
        raise TypeError(f"{call}: dtypes['{name}'] is {wanted!r}; expected one of {', '.join(usable)}.")
    if to == dtype:
        return column

    def read(first: int, last: int) -> np.ndarray:
        rows = column.read(first, last)
        with np.errstate(all="ignore"):
            cast = rows.astype(to)
        if exact or to.kind in "iub":
            lost = not np.array_equal(cast.astype(dtype), rows)
        else:
            lost = dtype.kind == to.kind == "f" and bool((np.isinf(cast) & ~np.isinf(rows)).any())
        if lost:
            other = "float32" if dtype.kind in "iub" else dtype.name
            raise ValueError(
                f"{call}: leaf '{name}' is {dtype.name}, and rows {first} to {last - 1} hold values that {to.name} cannot. "
                f"Enable jax_enable_x64, or cast: dtypes={{'{name}': '{other}'}}."
            )
        return cast

    return dataclasses.replace(column, dtype=to, read=read)


def squeeze_scalars(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return columns of torchrl's layout with scalars of shape [] instead of [1]."""

    def squeezed(column: Column) -> Column:
        return dataclasses.replace(column, shape=column.shape[:-1], read=lambda a, b: column.read(a, b)[..., 0])

    one = {name for name, column in columns.items() if name in _TED_SCALARS and column.shape[-1:] == (1,)}
    return {name: squeezed(column) if name in one else column for name, column in columns.items()}


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array; a large one begins at a multiple of 64 bytes, where JAX reads it on CPUs without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size < 1 << 20:
        return np.empty(shape, dtype)
    memory = np.empty(size + 64, np.uint8)
    first = -memory.__array_interface__["data"][0] % 64
    return memory[first : first + size].view(dtype).reshape(shape)


def padded(array: Any, size: int, value: Any = 0) -> np.ndarray[Any, Any]:
    """Return the array with `size` entries on its first axis, the new ones `value`."""
    array = np.asarray(array)
    if len(array) == size:
        return array
    out = np.full((size, *array.shape[1:]), value, array.dtype)
    out[: len(array)] = array
    return out


def rows_per_block(leaves: Iterable[Any], lanes: int | None = None) -> int:
    """Return the number of rows (per lane) that make a block of 8 MiB, of leaves with a shape and a dtype."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) * (lanes or 1)
    return max(1, BLOCK_BYTES // max(1, size))


def blocks(
    call: str, columns: Mapping[str, Column], first: int, last: int, size: int, lanes: tuple[int, ...] = ()
) -> Iterator[Block]:
    """Yield rows from the first to before the last in blocks, checked against the columns' shapes and dtypes."""
    for start in range(first, last, size):
        stop = min(start + size, last)
        block = {}
        for name, column in columns.items():
            rows = block[name] = column.read(start, stop)
            expected = (stop - start, *lanes, *column.shape)
            if rows.shape != expected or rows.dtype != column.dtype:
                raise ValueError(
                    f"{call}: rows {start} to {stop - 1} of '{name}' are {rows.dtype}{list(rows.shape)}; expected "
                    f"{column.dtype}{list(expected)}. The source changed during the call, or is damaged."
                )
        yield block
