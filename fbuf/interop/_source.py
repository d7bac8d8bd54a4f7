"""`Source`: rows of another library or a file, that can fill a buffer or become a data set."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_int
from fbuf._core.progress import Progress
from fbuf._core.text_table import counted
from fbuf._host.codecs import Codec
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf._rows import columns as _columns
from fbuf._rows.columns import Block, Column, Fields, array_column, cast_columns, choose_leaves, columns_of, flag
from fbuf.datasets import _open
from fbuf.datasets._arrays.segments import check_free, to_path
from fbuf.datasets._arrays.write import Settings, Tables, opened, plan_rows, plan_tables, write_columns, write_tables
from fbuf.interop import _fill, _guards
from fbuf.torch._dtypes import NARROW


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of another library or a file, in order of time; nothing is read before `into` or `save`.

    Every `from_...` of `fbuf.interop` returns one. A source of steps has `terminated` and `truncated`, and `final_obs` where
    final observations are known; its last row (of each lane) is truncated unless it terminated.

    Attributes:
      format: What it was recognised as.
      columns: By name, as in the source.
      steps: Rows (per lane); -1: an iterable of unknown length.
      lanes: E; None: one stream.
      call: The function that made it, for messages.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> source = fbuf.interop.from_arrays({"obs": np.zeros((5, 3), np.float32), "action": np.arange(5)})
      >>> source
      Source(arrays: 5 rows, obs float32[3], action int64[])
      >>> buffer, state = source.into()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     buffer, state = source.save(f"{folder}/five")
      ...     del state
    """

    format: str
    columns: Mapping[str, Column]
    steps: int
    lanes: int | None = None
    mask: Callable[[int, int], np.ndarray] | None = None
    priority: np.ndarray | None = None
    largest: float = 1.0
    structure: Any = None
    call: str = "from_arrays"
    fields: Fields = None
    dtypes: Mapping[str, str] | None = None
    exponents: tuple[float, float] = (0.6, 0.4)
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    plain: bool = True
    episode_end: tuple[str, ...] | None = None
    forward: bool = False
    narrow: bool = False
    slots: bool = False
    rows: int | None = None
    tables: Iterable[Any] | None = None

    def __repr__(self) -> str:
        if self.tables is not None:
            return f"Source({self.format})"
        lanes = "" if self.lanes is None else f" in each of {counted(self.lanes, 'lane')}"
        leaves = [f"{name} {c.dtype.name}{list(c.shape)}" for name, c in self.columns.items() if not c.refused]
        return f"Source({self.format}: {counted(self.steps, 'row')}{lanes}, {', '.join(leaves)})"

    def into(
        self,
        buffer: Buffer | None = None,
        *,
        capacity: int | None = None,
        newest: int | None = None,
        progress: Progress = None,
    ) -> tuple[Buffer, BufferState]:
        """Fill a buffer with the rows, oldest first.

        Args:
          buffer: The buffer to fill; None: one with room for exactly these rows, `Uniform`, or `Prioritized` if the source has
            priorities.
          capacity: Of the buffer made if none is passed; None: the number of rows.
          newest: Take only this number of rows (per lane), the last ones.
          progress: True: a bar; or a function of `(done, total)`, in rows (per lane).
        Returns:
          The buffer, and its state.
        Raises:
          ValueError: leaves of different lengths; text or objects; more rows than capacity; other lanes; a value that a dtype
            cannot hold; no leaf says where episodes end.
          TypeError: 64-bit floats while jax_enable_x64 is off and without a cast; a dtype that no buffer holds.
        Cost: O(N), in blocks of about 8 MiB.

        Example:
          >>> import fbuf, numpy as np
          >>> buffer, state = fbuf.interop.from_arrays({"t": np.arange(5)}).into(newest=3)
          >>> buffer.rows(state).data["t"].tolist()
          [2, 3, 4]
        """
        return _fill.fill(self, buffer, capacity=capacity, newest=newest, progress=progress)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        codec: Mapping[str, Codec] | None = None,
        segment_rows: int | None = None,
        view: View | None = None,
        sampler: Sampler | None = None,
        metadata: Mapping[str, Any] | None = None,
        workers: int = 0,
        progress: Progress = None,
    ) -> tuple[Buffer, BufferState]:
        """Write a data set, and open it. Lanes are written one after another.

        Args:
          path: The folder to write, which must not exist. An interrupted call with the same arguments is completed (not with an
            iterable or an `.npz`, which leave nothing).
          codec: `{name here: codec}`, `storages.Zstd(...)`, `BitPack()` or `Raw()`; default `Zstd()` for leaves of 1 KiB per
            row or more, and for `final_obs`.
          segment_rows: Rows of a segment; None: 512 MiB before compression, at most a million. A segment is written atomically,
            and is in memory, compressed, until then.
          view, sampler: Of the buffer; None: `Transition` if rows are steps, and `Uniform`.
          metadata: Further JSON to store; `fbuf.datasets.info` shows it.
          workers: Segments written at a time, in threads, if rows can be read in any order; 0: one.
          progress: True: a bar; or a function of `(rows done, total)`, the total 0 for an iterable.
        Returns:
          The buffer and its state, as from `fbuf.datasets.open(path)`.
        Raises:
          FileExistsError: `path` exists.
          ValueError, TypeError: as for `into`; a reward that is not finite; a flag that is neither 0 nor 1; an iterable whose
            dicts differ; no rows.
        Cost: O(N), in blocks of about 8 MiB; flags and rewards are read twice, and a file with lanes once for each lane.

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
          ...     buffer, state = fbuf.interop.from_arrays(data).save(f"{folder}/hopper")
          ...     rows = buffer.rows(state).data
          ...     print(buffer.capacity, rows["obs"][1], rows["terminated"])
          ...     del state
          6 [2. 3.] [False False  True False False False]
        """
        call = self.call
        path = to_path(call, "path", path)
        check_int(call, "workers", workers, 0)
        check = functools.partial(_open.check, path, view, sampler)
        check()
        try:
            about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False)) | {"from": self.format}
        except (TypeError, ValueError) as error:
            raise TypeError(f"{call}: metadata is not JSON ({error}); expected text, numbers and lists.") from None
        check_free(call, path, unfinished=not self.forward and self.tables is None)
        plain = self.plain and self.lanes is None
        settings = Settings(self.episode_end, codec, segment_rows, check, about, workers, progress, plain, self.forward)
        if self.tables is not None:
            write_tables(call, self._tables(), path, settings)
        else:
            columns, rows = self.stream()
            write_columns(call, columns, rows, path, settings)
        return opened(path, view, sampler)

    def taken(self, exact: tuple[str, ...] = ()) -> tuple[dict[str, Column], int]:
        """Return the columns to take, by their names here and in their dtypes, and their number of rows (per lane)."""
        call, ted = self.call, self.fields == "ted"
        names = choose_leaves(call, self.columns, self.fields, self.known)
        columns = {here: self.columns[source] for source, here in names.items()}
        dtypes = dict(self.dtypes or {})
        flags = () if self.plain else ("terminated", "truncated", *(self.episode_end or ()))  # checked to be 0 or 1
        narrowed = {name: c.dtype.name for name, c in columns.items() if c.dtype.name in NARROW}
        dtypes = {name: NARROW[dtype] for name, dtype in narrowed.items() if self.narrow or name in flags} | dtypes
        columns = cast_columns(call, _columns.squeeze_scalars(columns) if ted else columns, dtypes, exact)
        if self.rows is not None:
            return columns, _guards.checked_rows(call, self.rows, self.steps)
        if self.slots:
            _guards.check_written(call, columns, self.steps)
        return columns, self.steps

    def stream(self) -> tuple[dict[str, Column], int]:
        """Return columns of one stream, lane after lane, by their names here, and their number of rows."""
        columns, steps = self.taken()
        if self.lanes is None:
            return columns, steps
        lanes = self.lanes
        exists = np.ones((steps, lanes), bool) if self.mask is None else self.mask(0, steps)
        ages = [np.flatnonzero(exists[:, lane]) for lane in range(lanes)]
        first = np.concatenate([[0], np.cumsum([len(age) for age in ages])])
        total = int(first[-1])

        def flat(column: Column) -> Column:
            def read(start: int, stop: int) -> np.ndarray:
                parts = [np.zeros((0, *column.shape), column.dtype)]
                for lane, age in enumerate(ages):
                    at = age[max(start - first[lane], 0) : max(stop - first[lane], 0)]
                    if len(at):
                        parts.append(column.read(int(at[0]), int(at[-1]) + 1)[at - at[0], lane])
                return np.concatenate(parts)

            return dataclasses.replace(column, read=read, rows=total)

        out = {name: flat(column) for name, column in columns.items()}
        last = np.zeros(total + 1, bool)
        last[first[1:] - 1] = True  # an empty lane repeats the last of the lane before it, or names no row
        cut = array_column(last[:total])
        cut = flag(np.greater, cut, out["terminated"]) if "terminated" in out else cut
        return out | {"truncated": flag(np.logical_or, out["truncated"], cut) if "truncated" in out else cut}, total

    def _tables(self) -> Tables:
        """Yield the columns of each table that has rows, and their number."""
        for item in self.tables or ():
            if not isinstance(item, Mapping):
                raise TypeError(f"{self.call}: data gives a {type(item).__name__}; expected dicts of arrays.")
            found = columns_of(self.call, item)
            if not found or any(column.rows for column in found.values()):
                names = choose_leaves(self.call, found, self.fields, self.known)
                rows = _columns.row_count(self.call, {source: found[source] for source in names})
                yield dataclasses.replace(self, columns=found, tables=None, slots=False).taken()[0], rows

    def stored(self, exact: tuple[str, ...] = ()) -> tuple[dict[str, Any], Callable[..., Iterator[Block]], int]:
        """Return the leaves of a stored row, a function that yields blocks of rows, and the number of rows (per lane)."""
        settings = Settings(self.episode_end, plain=self.plain)
        if self.tables is not None:
            plan, raw = plan_tables(self.call, self._tables(), settings)
            return plan.example, lambda first, last, size: plan.marked(self.call, 0, raw, None, []), -1
        columns, steps = self.taken(exact)
        lanes = () if self.lanes is None else (self.lanes,)
        if not steps and not self.plain:
            raise ValueError(f"{self.call}: there are no rows; expected one at least.")
        if self.plain:
            example = {name: jax.ShapeDtypeStruct(column.shape, column.dtype) for name, column in columns.items()}
            return (
                example,
                lambda first, last, size: _columns.blocks(self.call, columns, first, last, size, lanes),
                steps,
            )
        plan = plan_rows(self.call, columns, settings, self.lanes)

        def rows(first: int, last: int, size: int) -> Iterator[Block]:
            raw = _columns.blocks(self.call, columns, first, last, size, lanes)
            return plan.marked(self.call, first, raw, None, [])

        return plan.example, rows, steps

    def count(self) -> dict[str, int]:
        """Return the numbers of rows, and of steps also those of episodes, terminations and truncations.

        Raises:
          ValueError: rows come from an iterable, which is read once.
        """
        if self.tables is not None:
            raise ValueError(
                f"{self.call}: data is an iterable, which is read once. Save it, and see fbuf.datasets.info(path)."
            )
        columns, rows = self.stream()
        settings = Settings(self.episode_end, plain=self.plain and self.lanes is None)
        ends = plan_rows(self.call, columns, settings).ends
        if ends is None:
            return {"rows": rows}
        flags = {name: columns[name] for name in ends.flags(columns)}
        follow = {name: columns[name] for pair in ends.follows.items() for name in pair}
        out = dict.fromkeys(("terminated", "truncated"), 0)
        read = _columns.blocks(self.call, flags | follow, 0, rows, _columns.rows_per_block((flags | follow).values()))
        for block in ends.mark_blocks(self.call, 0, read, None, []):
            out = {name: number + int(block[name].sum()) for name, number in out.items()}
        return {"rows": rows, "episodes": sum(out.values()), **out}
