"""Convert flat arrays to rows: name, cast, mark episodes, write in segments.

Columns that can be read in any order (`write_columns`) are checked from end to end, written several segments at a time, and
resumed after an interruption. A stream (`write_tables`) is checked on the way.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._core.progress import Progress
from fbuf._formats import dataset
from fbuf._host.codecs.codec import Codec
from fbuf._host.types import flat
from fbuf.datasets._arrays.episodes import KNOWN, Ends, as_flag, check_rewards, ends_of, final_codec, final_name
from fbuf.datasets._arrays.segments import Work, rows_per_segment, write, write_stream
from fbuf.interop._columns import (
    Block,
    Column,
    blocks,
    cast_columns,
    check_name,
    choose_leaves,
    column_of,
    row_count,
    rows_per_block,
)

CALL = "from_arrays"
Leaves = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype by name."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `from_arrays`."""

    fields: Mapping[str, str] | Sequence[str] | None
    episode_end: tuple[str, ...] | None
    dtypes: Mapping[str, str] | None
    codec: Mapping[str, Codec] | None
    piece_rows: int | None
    check: Callable[[dataset.Schema], None] = lambda schema: None  # what is to be opened afterwards
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # metadata
    workers: int = 0
    progress: Progress = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How columns become rows.

    Attributes:
      leaves: Of the columns, by their names here.
      ends: How episodes end.
      schema: Of the rows as they are stored.
    """

    leaves: Leaves
    ends: Ends
    schema: dataset.Schema

    @property
    def block(self) -> int:
        """Rows of a block."""
        return rows_per_block(self.schema.leaves)

    def check(self, where: str, columns: Mapping[str, Column]) -> None:
        """Raise ValueError unless columns have the names, shapes and dtypes of the first."""
        found, expected = (
            {name: f"{dtype.name}{list(shape)}" for name, (shape, dtype) in leaves.items()}
            for leaves in (leaves_of(columns), self.leaves)
        )
        for name in (*found, *expected):
            if found.get(name) != expected.get(name):
                what, first = found.get(name, "missing"), expected.get(name, "no such leaf")
                raise ValueError(f"{where} leaf '{name}' is {what}; expected {first}, as in the first rows.")


def columns_of(call: str, data: Mapping[str, Any], prefix: str = "") -> dict[str, Column]:
    """Return the leaves of nested dicts of arrays."""
    out: dict[str, Column] = {}
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{call}: a dict has the key {key!r}; expected the name of a leaf.")
        name = check_name(call, prefix + key)
        found = columns_of(call, value, name + "/") if isinstance(value, Mapping) else {name: column_of(name, value)}
        if twice := [leaf for leaf in found if leaf in out]:
            raise ValueError(f"{call}: two leaves have the name '{twice[0]}'. Rename one, or leave it out.")
        out |= found
    return out


def choose_columns(call: str, found: Mapping[str, Column], settings: Settings) -> tuple[dict[str, Column], int]:
    """Return the columns to take, by their names here and in their dtypes, and their number of rows."""
    names = choose_leaves(call, found, settings.fields, KNOWN)
    rows = row_count(call, {there: found[there] for there in names})
    return cast_columns(call, {here: found[there] for there, here in names.items()}, settings.dtypes), rows


def plan_rows(call: str, columns: Mapping[str, Column], settings: Settings) -> Plan:
    """Return the plan. Raises errors of names, dtypes and ends; no row is read."""
    here = leaves_of(columns)
    ends = ends_of(call, here, settings.episode_end)
    leaves = {name: leaf for name, leaf in here.items() if name not in ends.follows.values()}
    flags = dict.fromkeys((*ends.flags(here), "terminated", "truncated"), ((), np.dtype(bool)))
    finals = {final_name(name): leaves[name] for name in ends.follows}
    codec = {name: final_codec(*leaf) for name, leaf in finals.items()} | dict(settings.codec or {})
    schema = dataset.Schema(leaves | finals | flags, codec=codec)
    settings.check(schema)
    return Plan(here, ends, schema)


def leaves_of(columns: Mapping[str, Column]) -> Leaves:
    """Return shapes and dtypes."""
    return {name: (column.shape, column.dtype) for name, column in columns.items()}


def write_columns(found: Mapping[str, Column], path: Path, settings: Settings) -> None:
    """Write a data set from columns that can be read in any order."""
    columns, rows = choose_columns(CALL, found, settings)
    if not rows:
        raise ValueError(f"{CALL}: there are no rows; expected one at least.")
    plan = plan_rows(CALL, columns, settings)
    _check_rows(columns, plan, rows)
    size = rows_per_segment(CALL, settings.piece_rows, plan.schema)
    begin = zlib.crc32(repr((rows, plan.ends)).encode())
    pieces = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    marks: dict[int, str] = {}
    cuts: list[int] = []

    def after(stop: int) -> Block | None:
        return None if stop == rows else {name: columns[name].read(stop, stop + 1) for name in plan.ends.follows}

    def raw(number: int) -> Iterator[Block]:
        start, stop = pieces[number]
        checksum = _checksum(after(stop) or {}, begin)
        for block in blocks(CALL, columns, start, stop, plan.block):
            checksum = _checksum(block, checksum)
            yield block
        marks[number] = f"arrays {checksum:08x}"

    def finished(number: int) -> Iterator[Block]:
        start, stop = pieces[number]
        return plan.ends.mark_blocks(CALL, start, raw(number), after(stop), cuts)

    def mark(number: int) -> str:
        if number not in marks:
            for _ in raw(number):
                pass
        return marks[number]

    sizes = [stop - start for start, stop in pieces]
    work = Work(plan.schema, sizes, finished, mark, lambda: {**settings.about, "from": "arrays"})
    write(CALL, path, work, workers=settings.workers, progress=settings.progress)
    _warn_of_cuts(sum(cuts), rows)


def _checksum(block: Block, checksum: int) -> int:
    """Update the checksum of all data of a segment, which identifies its rows."""
    for leaf in block.values():
        checksum = zlib.crc32(flat(np.ascontiguousarray(leaf)), checksum)
    return checksum


def _check_rows(columns: Mapping[str, Column], plan: Plan, rows: int) -> None:
    """Check rewards and flags before anything is written."""
    checked = {name: columns[name] for name in ("reward", *plan.ends.flags(columns)) if name in columns}
    size = rows_per_block(checked.values())
    for number, block in enumerate(blocks(CALL, checked, 0, rows, size) if checked else ()):
        check_rewards(CALL, number * size, block)
        for name in plan.ends.flags(block):
            as_flag(CALL, name, number * size, block[name])


def write_tables(data: Iterable[Any], path: Path, settings: Settings) -> None:
    """Write a data set from dicts of arrays that come once, in order of time."""
    tables = _tables(data, settings)
    first = next(tables, None)
    if first is None:
        raise ValueError(f"{CALL}: there are no rows; expected one at least.")
    plan = plan_rows(CALL, first[0], settings)
    size = rows_per_segment(CALL, settings.piece_rows, plan.schema)
    raw = _checked(itertools.chain(iter([first]), tables), plan)
    del first  # the arrays would stay in memory
    cuts: list[int] = []
    rows = plan.ends.mark_blocks(CALL, 0, raw, None, cuts)
    about = {**settings.about, "from": "arrays"}
    number = write_stream(CALL, path, plan.schema, rows, size, about, settings.progress)
    _warn_of_cuts(sum(cuts), number)


def _tables(data: Iterable[Any], settings: Settings) -> Iterator[tuple[dict[str, Column], int]]:
    """Yield the columns of each dict that has rows, and their number."""
    for item in data:
        if not isinstance(item, Mapping):
            raise TypeError(f"{CALL}: data gives a {type(item).__name__}; expected dicts of arrays.")
        found = columns_of(CALL, item)
        if not found or any(column.rows for column in found.values()):
            yield choose_columns(CALL, found, settings)


def _checked(tables: Iterable[tuple[Mapping[str, Column], int]], plan: Plan) -> Iterator[Block]:
    """Yield blocks of rows, copied, since the caller may reuse the arrays."""
    number = 0
    for columns, rows in tables:
        plan.check(f"{CALL}: from row {number} on", columns)
        for block in blocks(CALL, columns, 0, rows, plan.block):
            yield {name: np.array(leaf) for name, leaf in block.items()}
            del block
        number += rows
        del columns


def _warn_of_cuts(cuts: int, rows: int) -> None:
    """Warn if next observations are seldom those of the next rows."""
    if cuts > max(rows // 2, 8):
        warnings.warn(
            f"{CALL}: in {cuts} of {rows} rows next_observations is not the next row's observation; they are now episodes of "
            f"one step. Scale both alike, unless the rows are shuffled.",
            stacklevel=4,
        )
