"""Flat arrays as columns: what they are called here, whether they fit together, and how ends are found in them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fbuf import _pieces
from fbuf._host.codec import Codec
from fbuf.datasets._episodes import Ends, as_flag, check_rewards, ends_of, final_codec, final_name
from fbuf.datasets._names import Names, named
from fbuf.interop._columns import block_of, cast, chosen
from fbuf.interop._fill import BLOCK_BYTES
from fbuf.interop._source import DTYPES, Column, Source, refused

CALL = "from_arrays"
Found = Mapping[str, tuple[Column, int]]
"""Columns by their names there, and their lengths; -1 where they have none."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `from_arrays` was asked for."""

    fields: Names
    episode_end: tuple[str, ...] | None
    dtypes: Mapping[str, str] | None
    codec: Mapping[str, Codec] | None
    piece_rows: int | None
    check: Callable[[_pieces.Schema], None] = lambda schema: None  # what is to be opened afterwards


@dataclasses.dataclass(frozen=True)
class Plan:
    """Columns by their names here, and what is made of them."""

    columns: Mapping[str, Column]
    ends: Ends
    schema: _pieces.Schema

    @property
    def block(self) -> int:
        """Rows that make 8 MiB."""
        return max(1, BLOCK_BYTES // max(1, self.schema.row_bytes))


def planned(columns: Mapping[str, Column], settings: Settings, rows: int) -> Plan:
    """Raises what is wrong with names, dtypes and ends; looks at no row."""
    taken = named(CALL, columns, settings.fields)
    if not taken:
        raise ValueError(f"{CALL}: there are no leaves; expected at least one.")
    here = chosen(CALL, Source(columns, rows), taken)
    given = settings.dtypes or {}
    if unknown := [name for name in given if name not in here]:
        raise ValueError(
            f"{CALL}: dtypes has '{unknown[0]}', but leaves are {', '.join(here)} (as they are called here)."
        )
    here = {name: cast(CALL, name, column, given.get(name)) for name, column in here.items()}
    ends = ends_of(CALL, {name: (column.shape, column.dtype) for name, column in here.items()}, settings.episode_end)
    leaves: dict[str, tuple[tuple[int, ...], Any]] = {}
    for name, column in here.items():
        if name not in ends.follows.values():
            leaves[name] = column.shape, np.dtype(bool) if name in ends.flags(here) else column.dtype
    finals = {final_name(name): leaves[name] for name in ends.follows}
    leaves |= finals | {name: ((), np.dtype(bool)) for name in ("terminated", "truncated")}
    codec = {name: final_codec(*leaves[name]) for name in finals} | dict(settings.codec or {})
    schema = _pieces.Schema(leaves, codec=codec)
    settings.check(schema)
    return Plan(here, ends, schema)


def columns_of(data: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Column, int]]:
    """Leaves of nested dicts, and their lengths."""
    out: dict[str, tuple[Column, int]] = {}
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{CALL}: a dict has the key {key!r}; expected the name of a leaf.")
        name = prefix + key
        found = columns_of(value, name + "/") if isinstance(value, Mapping) else {name: _column(name, value)}
        if twice := [leaf for leaf in found if leaf in out]:
            raise ValueError(
                f"{CALL}: two leaves have the name '{twice[0]}'; expected one. Rename or leave out the other."
            )
        out |= found
    return out


def _column(name: str, value: Any) -> tuple[Column, int]:
    array = value if hasattr(value, "shape") and hasattr(value, "dtype") else _as_array(name, value)
    shape = tuple(array.shape)
    if not shape:
        return refused(f"leaf '{name}' is a scalar; expected [N, ...]."), -1
    dtype = DTYPES.get(getattr(array.dtype, "name", ""))
    if dtype is None or dtype != array.dtype:
        return refused(f"leaf '{name}' is {array.dtype}; expected plain numbers, or booleans.{_fix(array)}"), shape[0]
    return Column(shape[1:], dtype, _slices(array)), shape[0]


def _fix(array: Any) -> str:
    """How numbers that are stored in another way become such as are expected."""
    if type(array).__module__.partition(".")[0] == "torch":
        return " Give x.numpy()."
    if isinstance(array.dtype, np.dtype) and array.dtype.kind in "iufc":  # of the other byte order
        return f" Give x.astype('{array.dtype.name}')."
    return ""


def _as_array(name: str, value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{CALL}: leaf '{name}' is no array ({error}); expected [N, ...].") from None


def _slices(array: Any) -> Any:
    return lambda first, last: np.asarray(array[first:last])


def length_of(found: Mapping[str, tuple[Column, int]], taken: Mapping[str, str]) -> int:
    """Rows, of which all leaves have as many."""
    lengths = {name: found[name][1] for name in taken if not found[name][0].refused}
    for name in taken:
        if found[name][0].refused:
            fix = f" Leave it out: fields={list(lengths)}." if lengths else ""
            raise ValueError(f"{CALL}: {found[name][0].refused}{fix}")
    rows = max(lengths.values(), key=lambda n: sum(n == m for m in lengths.values()), default=0)
    odd = next((name for name, n in lengths.items() if n != rows), None)
    if odd is not None:
        like = next(name for name, n in lengths.items() if n == rows)
        fitting = [name for name, n in lengths.items() if n == rows]
        raise ValueError(
            f"{CALL}: leaf '{odd}' has {lengths[odd]} rows, but '{like}' has {rows}; expected as many. Cut them to the same "
            f"length, or leave it out: fields={fitting}."
        )
    if not rows:
        raise ValueError(f"{CALL}: there are no rows; expected one at least.")
    return rows


def check_rows(plan: Plan, rows: int) -> None:
    """What must hold of values, before anything is written."""
    names = [name for name in ("reward", *plan.ends.flags(plan.columns)) if name in plan.columns]
    size = sum(plan.columns[name].dtype.itemsize for name in names)
    block = max(1, BLOCK_BYTES // max(1, size))
    for start in range(0, rows, block):
        last = min(start + block, rows)
        for name in names:
            leaf = block_of(CALL, name, plan.columns[name], start, last, ())
            if name == "reward":
                check_rewards(CALL, start, {name: leaf})
            else:
                as_flag(CALL, name, start, leaf)


def warn_of_cuts(cuts: int, rows: int) -> None:
    """Warns where next observations are hardly ever those of the next rows."""
    if cuts > max(rows // 2, 8):
        warnings.warn(
            f"{CALL}: in {cuts} of {rows} rows next_observations is not the observation of the next row, although no episode "
            f"ended: these are now episodes of one step. If rows lie in another order than they came in, that is right; if "
            f"the two were scaled differently, scale them alike.",
            stacklevel=4,
        )
