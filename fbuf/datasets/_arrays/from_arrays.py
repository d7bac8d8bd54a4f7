"""`from_arrays`: write flat arrays, in the layout of D4RL and others, to a data set.

Data that slices (arrays, `numpy.memmap`, HDF5) is checked from end to end first, then written in segments in parallel, and
resumed after an interruption. Streams (iterators, `.npz`) are checked on the way, and a failure leaves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_int
from fbuf._core.progress import Progress
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import load
from fbuf._host.codecs import Codec
from fbuf._host.types import flat
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._arrays import episodes
from fbuf.datasets._arrays.segments import Work, check_free, rows_per_segment, to_path, write, write_stream
from fbuf.interop import _columns, _guards, _load

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
    ends: str | None = None
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How columns become rows.

    Attributes:
      leaves: Of the columns, by their names here.
      ends: How episodes end.
      schema: Of the rows as they are stored.
    """

    leaves: Leaves
    ends: episodes.Ends
    schema: dataset.Schema

    @property
    def block(self) -> int:
        """Rows of a block."""
        return _columns.rows_per_block(self.schema.leaves)

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


def columns_of(call: str, data: Mapping[str, Any], prefix: str = "") -> dict[str, _columns.Column]:
    """Return the leaves of nested dicts of arrays."""
    out: dict[str, _columns.Column] = {}
    for key, value in data.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{call}: a dict has the key {key!r}; expected the name of a leaf.")
        name = _columns.check_name(call, prefix + key)
        found = (
            columns_of(call, value, name + "/")
            if isinstance(value, Mapping)
            else {name: _columns.column_of(name, value)}
        )
        if twice := [leaf for leaf in found if leaf in out]:
            raise ValueError(f"{call}: two leaves have the name '{twice[0]}'. Rename one, or leave it out.")
        out |= found
    return out


def choose_columns(
    call: str, found: Mapping[str, _columns.Column], settings: Settings
) -> tuple[dict[str, _columns.Column], int]:
    """Return the columns to take, by their names here and in their dtypes, and their number of rows."""
    names = _columns.choose_leaves(call, found, settings.fields, known_names(settings))
    rows = _columns.row_count(call, {there: found[there] for there in names})
    return _columns.cast_columns(call, {here: found[there] for there, here in names.items()}, settings.dtypes), rows


def known_names(settings: Settings) -> Mapping[str, str]:
    """Return the names here of the first parts of known names."""
    if settings.ends != "trajectory":
        return episodes.KNOWN
    return episodes.KNOWN | dict.fromkeys(_guards.TERMINALS, "truncated")


def plan_rows(call: str, columns: Mapping[str, _columns.Column], settings: Settings) -> Plan:
    """Return the plan. Raises errors of names, dtypes and ends; no row is read."""
    here = leaves_of(columns)
    ends = episodes.ends_of(call, here, settings.episode_end)
    leaves = {name: leaf for name, leaf in here.items() if name not in ends.follows.values()}
    flags = dict.fromkeys((*ends.flags(here), "terminated", "truncated"), ((), np.dtype(bool)))
    finals = {episodes.final_name(name): leaves[name] for name in ends.follows}
    codec = {name: episodes.final_codec(*leaf) for name, leaf in finals.items()} | dict(settings.codec or {})
    schema = dataset.Schema(leaves | finals | flags, codec=codec)
    settings.check(schema)
    return Plan(here, ends, schema)


def leaves_of(columns: Mapping[str, _columns.Column]) -> Leaves:
    """Return shapes and dtypes."""
    return {name: (column.shape, column.dtype) for name, column in columns.items()}


def write_columns(found: Mapping[str, _columns.Column], path: Path, settings: Settings) -> None:
    """Write a data set from columns that can be read in any order."""
    _guards.check_ring(CALL, found)
    _guards.check_terminals(CALL, found, settings.fields, settings.ends)
    columns, rows = choose_columns(CALL, found, settings)
    if not rows:
        raise ValueError(f"{CALL}: there are no rows; expected one at least.")
    rows = _guards.written_rows(CALL, columns, rows, settings.rows)
    plan = plan_rows(CALL, columns, settings)
    _check_rows(columns, plan, rows)
    size = rows_per_segment(CALL, settings.piece_rows, plan.schema)
    begin = zlib.crc32(repr((rows, plan.ends)).encode())
    pieces = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    marks: dict[int, str] = {}
    cuts: list[int] = []

    def after(stop: int) -> _columns.Block | None:
        return None if stop == rows else {name: columns[name].read(stop, stop + 1) for name in plan.ends.follows}

    def raw(number: int) -> Iterator[_columns.Block]:
        start, stop = pieces[number]
        checksum = _checksum(after(stop) or {}, begin)
        for block in _columns.blocks(CALL, columns, start, stop, plan.block):
            checksum = _checksum(block, checksum)
            yield block
        marks[number] = f"arrays {checksum:08x}"

    def finished(number: int) -> Iterator[_columns.Block]:
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


def _checksum(block: _columns.Block, checksum: int) -> int:
    """Update the checksum of all data of a segment, which identifies its rows."""
    for leaf in block.values():
        checksum = zlib.crc32(flat(np.ascontiguousarray(leaf)), checksum)
    return checksum


def _check_rows(columns: Mapping[str, _columns.Column], plan: Plan, rows: int) -> None:
    """Check rewards and flags before anything is written."""
    checked = {name: columns[name] for name in ("reward", *plan.ends.flags(columns)) if name in columns}
    size = _columns.rows_per_block(checked.values())
    for number, block in enumerate(_columns.blocks(CALL, checked, 0, rows, size) if checked else ()):
        episodes.check_rewards(CALL, number * size, block)
        for name in plan.ends.flags(block):
            episodes.as_flag(CALL, name, number * size, block[name])


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


def _tables(data: Iterable[Any], settings: Settings) -> Iterator[tuple[dict[str, _columns.Column], int]]:
    """Yield the columns of each dict that has rows, and their number."""
    for item in data:
        if not isinstance(item, Mapping):
            raise TypeError(f"{CALL}: data gives a {type(item).__name__}; expected dicts of arrays.")
        found = columns_of(CALL, item)
        if not found or any(column.rows for column in found.values()):
            _guards.check_ring(CALL, found)
            _guards.check_terminals(CALL, found, settings.fields, settings.ends)
            yield choose_columns(CALL, found, settings)


def _checked(tables: Iterable[tuple[Mapping[str, _columns.Column], int]], plan: Plan) -> Iterator[_columns.Block]:
    """Yield blocks of rows, copied, since the caller may reuse the arrays."""
    number = 0
    for columns, rows in tables:
        plan.check(f"{CALL}: from row {number} on", columns)
        for block in _columns.blocks(CALL, columns, 0, rows, plan.block):
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


def from_arrays(
    data: Any,
    *,
    path: str | os.PathLike[str],
    fields: Mapping[str, str] | Sequence[str] | None = None,
    episode_end: Sequence[str] | None = None,
    dtypes: Mapping[str, str] | None = None,
    codec: Mapping[str, Codec] | None = None,
    piece_rows: int | None = None,
    view: View | None = None,
    sampler: Sampler | None = None,
    metadata: Mapping[str, Any] | None = None,
    workers: int = 0,
    progress: Progress = None,
    ends: Literal["terminated", "trajectory"] | None = None,
    rows: int | None = None,
) -> tuple[Buffer, BufferState]:
    """Write a data set from flat arrays, and open it.

    `observations`, `actions`, `rewards`, `terminals`, `timeouts` (and their usual synonyms) become `obs`, `action`, `reward`,
    `terminated`, `truncated`; other leaves keep their names. `terminated` and `truncated` always exist, as bool.
    `next_observations` are compared with the observations of the next rows, and stored as `final_obs` where an
    episode ends; if they differ without an end, rows are missing, and the row is marked truncated. The last row is truncated
    unless it terminated.

    Args:
      data: A (nested) dict of arrays `[N, ...]`, or of anything that slices like them and has `shape` and `dtype`
        (`numpy.memmap`, an h5py group or data set); an iterable of such dicts, in order of time, each of any length, which
        is read
        once; or the path of an `.npz`, `.h5` or `.hdf5`.
      path: The folder to write, which must not exist. An interrupted call with the same arguments is completed (not with an
        iterable or an `.npz`, which leave nothing).
      fields: The leaves to take: `{name there: name here}`, or names; None: all.
      episode_end: Further boolean leaves (names here) that end an episode, as truncations unless `terminated`. (): rows
        are steps
        of no episode, unless a leaf says otherwise.
      dtypes: `{name here: dtype}`, the casts to make. Otherwise only 64-bit integers are cast, to 32 bits, if they fit and
        jax_enable_x64 is off.
      codec: `{name here: codec}`, `storages.Zstd(...)`, `BitPack()` or `Raw()`; default `Zstd()` for leaves of 1 KiB per
        row or
        more, and for `final_obs`.
      piece_rows: Rows of a segment; None: 512 MiB before compression, at most a million. A segment is written atomically,
        and is
        in memory, compressed, until then.
      view, sampler: Of the buffer; None: `Transition` if rows are steps, and `Uniform`.
      metadata: Further JSON to store; `fbuf.datasets.info` shows it.
      workers: Segments written at a time, in threads, if rows can be read in any order; 0: one.
      progress: True: a bar; or a function of `(rows done, total)`, the total 0 for an iterable.
      ends: What `terminals` mean where no leaf has the time limits. "terminated": terminations, after which the discount is 0.
        "trajectory": ends of trajectories, as OGBench's, after which agents bootstrap.
      rows: Take the first rows only; all of them: rows of zeros at the end are steps. None: such rows are an error.
    Returns:
      The buffer and its state, as from `fbuf.datasets.open(path)`.
    Raises:
      FileExistsError: `path` exists.
      ValueError: leaves of different lengths; two of one name; no leaf says where episodes end; a reward that is not
        finite; a
        flag that is neither 0 nor 1; text, objects; an iterable whose dicts differ; no rows.
      TypeError: 64-bit floats while jax_enable_x64 is off and without a cast.
    Cost: O(N), in blocks of about 8 MiB; flags and rewards are read twice.

    Example:
      >>> import fbuf, tempfile, numpy as np
      >>> data = {
      ...     "observations": np.arange(12, dtype=np.float32).reshape(6, 2),
      ...     "actions": np.zeros((6, 1), np.float32),
      ...     "rewards": np.ones(6, np.float32),
      ...     "terminals": np.array([0, 0, 1, 0, 0, 0], bool),
      ...     "timeouts": np.array([0, 0, 0, 0, 0, 1], bool),
      ... }
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     buffer, state = fbuf.datasets.from_arrays(data, path=f"{folder}/hopper")
      ...     rows = buffer.rows(state).data
      ...     print(buffer.capacity, rows["obs"][1], rows["terminated"])
      ...     del state
      6 [2. 3.] [False False  True False False False]
    """
    path = to_path(CALL, "path", path)
    check_int(CALL, "workers", workers, 0)
    _open.check(path, view, sampler)
    for name, value in {"fields": fields, "episode_end": episode_end}.items():
        if isinstance(value, str):
            raise TypeError(f"{CALL}: {name} is {value!r}; expected names. Write {name}=({value!r},).")
    extra = None if episode_end is None else tuple(episode_end)
    check = functools.partial(_open.check, path, view, sampler)
    try:
        about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{CALL}: metadata is not JSON ({error}); expected text, numbers and lists.") from None
    settings = Settings(fields, extra, dtypes, codec, piece_rows, check, about, workers, progress, ends, rows)
    if isinstance(data, (str, os.PathLike)):
        _from_file(Path(data).expanduser(), path, settings)
    elif isinstance(data, Mapping):
        check_free(CALL, path, unfinished=True)
        write_columns(columns_of(CALL, data), path, settings)
    elif isinstance(data, Iterable) and not hasattr(data, "dtype"):
        if rows is not None:
            raise ValueError(f"{CALL}: rows is {rows}, but data is an iterable. Yield only the rows to take.")
        check_free(CALL, path, unfinished=False)
        write_tables(data, path, settings)
    else:
        kind = type(data).__name__
        raise TypeError(f"{CALL}: data is a {kind}; expected a dict of arrays, an iterable of them, or a path.")
    return opened(path, view, sampler)


def opened(path: Path, view: View | None, sampler: Sampler | None) -> tuple[Buffer, BufferState]:
    """Open a data set, by default through the view for its leaves."""
    about = load(path)
    view = episodes.default_view(about.schema.names, about.rows) if view is None else view
    return _open.open(path, view=view, sampler=sampler)


def _from_file(file: Path, path: Path, settings: Settings) -> None:
    with _load.opened(CALL, file) as reader:
        check_free(CALL, path, unfinished=file.suffix != ".npz")
        columns, said = _load.columns_of(file, reader)
        if said is not None and said["lanes"] is not None:
            raise ValueError(f"{CALL}: {file} has rows of {said['lanes']} lanes; expected one stream, [N, ...].")
        if file.suffix != ".npz":
            return write_columns(columns, path, settings)
        _guards.check_ring(CALL, columns)
        _guards.check_terminals(CALL, columns, settings.fields, settings.ends)
        # Members of a zip are read from front to back only.
        names = _columns.choose_leaves(CALL, columns, settings.fields, episodes.KNOWN)
        columns = {name: columns[name] for name in names}
        rows, size = _columns.row_count(CALL, columns), _columns.rows_per_block(columns.values())
        rows = _guards.written_rows(
            CALL, {names[name]: column for name, column in columns.items()}, rows, settings.rows
        )
        tables = _columns.blocks(CALL, columns, 0, rows, size)
        write_tables(tables, path, dataclasses.replace(settings, fields=names))
