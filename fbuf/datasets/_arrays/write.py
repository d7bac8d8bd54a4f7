"""Write the columns of a source, or tables that come one by one, as the segments of a data set.

Columns that can be read in any order are checked from end to end first, then written in segments in parallel, and resumed after
an interruption. Streams are checked on the way, and a failure leaves nothing.

A segment is written atomically, and a data set without its manifest does not open, so an interruption leaves whole
segments. Only the same work reuses them: each has a mark made from its rows. Threads write them, since compression releases
Python's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._concurrency.parallel import Advance, run_parallel
from fbuf._core.arguments import is_int
from fbuf._core.progress import Bar, Progress
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import NAME, load
from fbuf._formats.dataset.segment_writer import MAX_ROWS
from fbuf._host.codecs import Codec
from fbuf._host.types import crc_of
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf._rows import columns as _columns
from fbuf._rows.columns import Block
from fbuf.datasets import _open
from fbuf.datasets._arrays import episodes
from fbuf.datasets._lock import NAME as LOCK
from fbuf.datasets._lock import exclusive

_SEGMENT_BYTES = 512 * 2**20  # before compression
_MOST_ROWS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Work:
    """What to write, segment by segment.

    Attributes:
      schema: Of the rows.
      rows: Of each segment.
      blocks: Yield the rows of segment `n`, in order, as blocks `{leaf: [m, ...]}`. Called from several threads.
      mark: Return a short text that identifies the rows of segment `n`.
      meta: Return the metadata, after all rows are written.
    """

    schema: dataset.Schema
    rows: Sequence[int]
    blocks: Callable[[int], Iterator[Block]]
    mark: Callable[[int], str]
    meta: Callable[[], Mapping[str, Any]]


def rows_per_segment(call: str, segment_rows: int | None, schema: dataset.Schema) -> int:
    """Return the rows of a segment: as asked for, or at most a million and 512 MiB before compression."""
    if segment_rows is None:
        return max(1, min(_MOST_ROWS, _SEGMENT_BYTES // max(schema.row_bytes, 1)))
    if not is_int(segment_rows) or not 1 <= segment_rows <= MAX_ROWS:
        raise ValueError(f"{call}: segment_rows is {segment_rows!r}; expected an int from 1 to {MAX_ROWS}, or None.")
    return int(segment_rows)


def check_free(call: str, path: Path, *, unfinished: bool) -> None:
    """Raise FileExistsError if `path` exists; an empty folder may, and `unfinished` segments on request."""
    delete = f"fbuf.datasets.delete({str(path)!r})"
    if (path / NAME).exists():
        raise FileExistsError(f"{call}: {path} is a data set already. Open it, or call {delete}.")
    if not path.exists():
        return
    names = set(os.listdir(path)) - {LOCK, NAME + ".new"} if path.is_dir() else {"."}
    if names - {"pieces"}:
        raise FileExistsError(f"{call}: {path} already exists and is not a data set. Choose another path.")
    if names and not unfinished:
        raise FileExistsError(f"{call}: {path} has segments of a stream, which cannot be resumed. Call {delete}.")


@contextlib.contextmanager
def _making(call: str, path: Path, *, unfinished: bool) -> Iterator[None]:
    """Hold the lock of a data set; on failure, remove what cannot be resumed."""
    check_free(call, path, unfinished=unfinished)
    with exclusive(call, path):
        check_free(call, path, unfinished=unfinished)  # another process may have finished it meanwhile
        try:
            yield
        except BaseException:
            if not (unfinished and dataset.committed(path)):
                dataset.remove(path)
            raise


def write(call: str, path: Path, work: Work, *, workers: int, progress: Progress) -> None:
    """Write the data set, or its missing segments.

    Raises:
      FileExistsError: there is a data set, or segments of other work.
      BlockingIOError: another process is writing it.
    """
    with _making(call, path, unfinished=True), contextlib.closing(Bar(progress, call, sum(work.rows), " rows")) as bar:
        done = _committed(call, path, work)
        bar(sum(work.rows[number] for number in done))

        def one(number: int, step: Advance) -> None:
            _write_segment(path, number, work.schema, work.blocks(number), lambda: work.mark(number), step)

        run_parallel([number for number in range(len(work.rows)) if number not in done], one, bar, workers)
        used = [dataset.SegmentRows(number, 0, rows) for number, rows in enumerate(work.rows)]
        dataset.finish(path, used, meta=dict(work.meta()))


def write_stream(
    call: str,
    path: Path,
    schema: dataset.Schema,
    blocks: Iterable[Block],
    segment_rows: int,
    meta: Mapping[str, Any],
    progress: Progress,
) -> int:
    """Write a data set from blocks that are read once, segment after segment; return the number of rows."""
    with _making(call, path, unfinished=False), contextlib.closing(Bar(progress, call, 0, " rows")) as bar:
        used: list[dataset.SegmentRows] = []
        for part in _split(blocks, segment_rows):
            rows = _write_segment(path, len(used), schema, part, lambda: "stream", bar)
            used.append(dataset.SegmentRows(len(used), 0, rows))
        bar.total = bar.done
        bar(0)
        dataset.finish(path, used, meta=dict(meta))
    return bar.done


def _write_segment(
    path: Path, number: int, schema: dataset.Schema, blocks: Iterable[Block], mark: Callable[[], str], step: Advance
) -> int:
    rows = 0
    with dataset.SegmentWriter(path, number, schema) as writer:
        for block in blocks:
            writer.append(block)
            rows += length_of(block)
            step(length_of(block))
        writer.commit(meta={"mark": mark()})
    return rows


def split_blocks(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield blocks of at most this many rows."""
    for block in blocks:
        for first in range(0, length_of(block), rows):
            yield {name: leaf[first : first + rows] for name, leaf in block.items()}


def _split(blocks: Iterable[Block], rows: int) -> Iterator[Iterator[Block]]:
    """Yield the blocks of one segment after another, cut at its size."""
    blocks = iter(blocks)
    rest: Block | None = None

    def part() -> Iterator[Block]:
        nonlocal rest
        left = rows
        while left and (rest := next(blocks, None) if rest is None else rest) is not None:
            block, length = rest, length_of(rest)
            rest = {name: leaf[left:] for name, leaf in block.items()} if length > left else None
            yield {name: leaf[:left] for name, leaf in block.items()}
            left -= min(length, left)

    while (rest := next(blocks, None) if rest is None else rest) is not None:
        yield part()


def length_of(block: Block) -> int:
    """Return the rows of a block."""
    return len(next(iter(block.values())))


def _committed(call: str, path: Path, work: Work) -> set[int]:
    """Return the numbers of the finished segments. Raises FileExistsError if one is of other work."""
    done: set[int] = set()
    for number, segment in (dataset.committed(path) if path.exists() else {}).items():
        same = number < len(work.rows) and segment.rows == work.rows[number] and segment.schema == work.schema
        if not same or segment.meta.get("mark") != work.mark(number):
            raise FileExistsError(
                f"{call}: {path} has segments of other rows or settings (segment {number}). Delete it, or choose another."
            )
        done.add(number)
    return done


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
