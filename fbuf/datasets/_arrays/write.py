"""Write the columns of a source, or tables that come one by one, as a data set.

Columns that can be read in any order are checked from end to end first, then written in segments in parallel, and resumed after
an interruption. Streams are checked on the way, and a failure leaves nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import load
from fbuf._host.codecs import Codec
from fbuf._host.types import crc_of
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf._rows import columns as _columns
from fbuf.datasets import _open
from fbuf.datasets._arrays import episodes
from fbuf.datasets._arrays.segments import Work, rows_per_segment, write, write_stream

"""Shape and dtype by name."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How columns become rows.

    Attributes:
      episode_end: Flags that end an episode, besides `terminated` and `truncated`; None: not stated.
      plain: Rows are stored as they are: no ends are marked.
      check: Called with the schema: raises what opening the result would raise.
      about: Metadata.
    """

    episode_end: tuple[str, ...] | None = None
    codec: Mapping[str, Codec] | None = None
    segment_rows: int | None = None
    check: Callable[[dataset.Schema], None] = lambda schema: None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workers: int = 0
    progress: Progress = None
    plain: bool = False
    forward: bool = False  # columns are read from front to back only, so that nothing is resumed


@dataclasses.dataclass(frozen=True)
class Plan:
    """How columns become rows.

    Attributes:
      leaves: Of the columns, by their names here.
      ends: How episodes end; None: rows are stored as they are.
      schema: Of the rows as they are stored.
    """

    leaves: episodes.Leaves
    ends: episodes.Ends | None
    schema: dataset.Schema

    @property
    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves of a stored row."""
        return {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.schema.leaves}

    @property
    def block(self) -> int:
        """Rows of a block."""
        return _columns.rows_per_block(self.schema.leaves)

    def marked(
        self, call: str, first: int, raw: Iterable[_columns.Block], after: _columns.Block | None, cuts: list[int]
    ) -> Iterator[_columns.Block]:
        """Yield blocks of rows as they are stored; arguments as for `Ends.mark_blocks`."""
        return iter(raw) if self.ends is None else self.ends.mark_blocks(call, first, raw, after, cuts)

    def check(self, where: str, columns: Mapping[str, _columns.Column]) -> None:
        """Raise ValueError unless columns have the names, shapes and dtypes of the first."""
        found, expected = (
            {name: f"{dtype.name}{list(shape)}" for name, (shape, dtype) in leaves.items()}
            for leaves in (leaves_of(columns), self.leaves)
        )
        for name in (*found, *expected):
            if found.get(name) != expected.get(name):
                what, first = found.get(name, "missing"), expected.get(name, "no such leaf")
                raise ValueError(f"{where} leaf '{name}' is {what}; expected {first}, as in the first rows.")


def plan_rows(call: str, columns: Mapping[str, _columns.Column], settings: Settings, lanes: int | None = None) -> Plan:
    """Return the plan. Raises errors of names, dtypes and ends; no row is read."""
    here = leaves_of(columns)
    ends = None if settings.plain else episodes.ends_of(call, here, settings.episode_end, lanes)
    leaves, finals = dict(here), {}
    if ends is not None:
        leaves = {name: leaf for name, leaf in here.items() if name not in ends.follows.values()}
        finals = {episodes.final_name(name): leaves[name] for name in ends.follows}
        leaves |= finals | dict.fromkeys((*ends.flags(here), "terminated", "truncated"), ((), np.dtype(bool)))
    codec = {name: episodes.final_codec(*leaf) for name, leaf in finals.items()} | dict(settings.codec or {})
    schema = dataset.Schema(leaves, codec=codec)
    settings.check(schema)
    return Plan(here, ends, schema)


def leaves_of(columns: Mapping[str, _columns.Column]) -> episodes.Leaves:
    """Return shapes and dtypes."""
    return {name: (column.shape, column.dtype) for name, column in columns.items()}


def write_columns(call: str, columns: Mapping[str, _columns.Column], rows: int, path: Path, settings: Settings) -> None:
    """Write a data set from columns, by their names here."""
    if not rows:
        raise ValueError(f"{call}: there are no rows; expected one at least.")
    plan = plan_rows(call, columns, settings)
    if settings.forward:
        return _write_stream(call, path, plan, _columns.blocks(call, columns, 0, rows, plan.block), settings)
    _check_rows(call, columns, plan, rows)
    size = rows_per_segment(call, settings.segment_rows, plan.schema)
    begin = zlib.crc32(repr((rows, plan.ends)).encode())
    segments = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    marks: dict[int, str] = {}
    cuts: list[int] = []
    follows = plan.ends.follows if plan.ends else {}

    def after(stop: int) -> _columns.Block | None:
        return None if stop == rows else {name: columns[name].read(stop, stop + 1) for name in follows}

    def raw(number: int) -> Iterator[_columns.Block]:
        start, stop = segments[number]
        checksum = crc_of((after(stop) or {}).values(), begin)
        for block in _columns.blocks(call, columns, start, stop, plan.block):
            checksum = crc_of(block.values(), checksum)
            yield block
        marks[number] = f"arrays {checksum:08x}"

    def finished(number: int) -> Iterator[_columns.Block]:
        start, stop = segments[number]
        return plan.marked(call, start, raw(number), after(stop), cuts)

    def mark(number: int) -> str:
        if number not in marks:
            for _ in raw(number):
                pass
        return marks[number]

    sizes = [stop - start for start, stop in segments]
    work = Work(plan.schema, sizes, finished, mark, lambda: settings.about)
    write(call, path, work, workers=settings.workers, progress=settings.progress)
    warn_of_cuts(call, sum(cuts), rows)


def _write_stream(call: str, path: Path, plan: Plan, raw: Iterable[_columns.Block], settings: Settings) -> None:
    cuts: list[int] = []
    size = rows_per_segment(call, settings.segment_rows, plan.schema)
    rows = plan.marked(call, 0, raw, None, cuts)
    number = write_stream(call, path, plan.schema, rows, size, settings.about, settings.progress)
    warn_of_cuts(call, sum(cuts), number)


def _check_rows(call: str, columns: Mapping[str, _columns.Column], plan: Plan, rows: int) -> None:
    """Check rewards and flags before anything is written."""
    flags = plan.ends.flags(columns) if plan.ends else []
    checked = {name: columns[name] for name in ("reward", *flags) if name in columns}
    size = _columns.rows_per_block(checked.values())
    for number, block in enumerate(_columns.blocks(call, checked, 0, rows, size) if checked and plan.ends else ()):
        episodes.check_rewards(call, number * size, block)
        for name in flags:
            episodes.as_flag(call, name, number * size, block[name])


Tables = Iterator[tuple[Mapping[str, _columns.Column], int]]
"""Columns by their names here, and their number of rows."""


def write_tables(call: str, tables: Tables, path: Path, settings: Settings) -> None:
    """Write a data set from tables that come once, in order of time."""
    plan, raw = plan_tables(call, tables, settings)
    _write_stream(call, path, plan, raw, settings)


def plan_tables(call: str, tables: Tables, settings: Settings) -> tuple[Plan, Iterator[_columns.Block]]:
    """Return the plan of the first table, and the blocks of all."""
    first = next(tables, None)
    if first is None:
        raise ValueError(f"{call}: there are no rows; expected one at least.")
    plan = plan_rows(call, first[0], settings)
    return plan, _checked(call, itertools.chain(iter([first]), tables), plan)


def _checked(call: str, tables: Tables, plan: Plan) -> Iterator[_columns.Block]:
    """Yield blocks of rows, copied, since the caller may reuse the arrays."""
    number = 0
    for columns, rows in tables:
        plan.check(f"{call}: from row {number} on", columns)
        for block in _columns.blocks(call, columns, 0, rows, plan.block):
            yield {name: np.array(leaf) for name, leaf in block.items()}
            del block
        number += rows
        del columns


def warn_of_cuts(call: str, cuts: int, rows: int) -> None:
    """Warn if next observations are seldom those of the next rows."""
    if cuts > max(rows // 2, 8):
        warnings.warn(
            f"{call}: in {cuts} of {rows} rows next_observations is not the next row's observation; they are now episodes of "
            f"one step. Scale both alike, unless the rows are shuffled.",
            stacklevel=5,
        )


def opened(path: Path, view: View | None, sampler: Sampler | None) -> tuple[Buffer, BufferState]:
    """Open a data set, by default through the view for its leaves."""
    about = load(path)
    view = episodes.default_view(about.schema.names, about.rows) if view is None else view
    return _open.open(path, view=view, sampler=sampler)
