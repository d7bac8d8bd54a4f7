"""Store observations and next observations of parallel environments, each row once.

The rows of a lane follow one another in a `Store`. The next observation of a step is the row after its observation: the
observation of the step that follows or, if the two differ in any byte, a final: a row of its own. Finals are the last rows
of episodes and of transitions out of order. A step that is written again gets new rows; rows that no step needs expire with
those before them, or are dropped when the store is rebuilt. Single steps are staged, and written eight at a time, because a
write costs more than compressing a row.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from fbuf._host.codecs import Codec
from fbuf._host.columns.spec import Column
from fbuf._host.memory.lazy_array import Sources, expect, within
from fbuf._host.store.store import Store
from fbuf._host.types import Array, Tickets, unfit

_STAGED = 8  # rows a write
_BLOCK = 128  # rows of a lane at once
_BLOCK_BYTES = 7 << 19  # of all lanes; NumPy asks for large pages from 4 MB on, and each block would clear new ones


class ObservationPairs:
    """`length` steps of each lane: what was observed, and what next. Thread-safe.

    Args:
      length: Steps a lane.
      lanes: E, environments that step together.
      shape, dtype: Of one observation of one lane, at least one byte.
      codec: Of the rows; None: as they are. With `Zstd` rows that are stacks of frames are recognised, and each frame is
        stored once.
      paired: Whether there are next observations.
    """

    def __init__(
        self, length: int, lanes: int, shape: tuple[int, ...], dtype: Any, codec: Codec | None, paired: bool = True
    ) -> None:
        self.length, self.lanes, self.paired = length, lanes, paired
        self.column = Column("observation", shape, dtype, codec, stacks=True)
        self._lane = np.arange(lanes)
        self._tickets = Tickets(lanes, length, 0)
        self._word = next(size for size in (8, 4, 2, 1) if self.column.nbytes % size == 0)  # compared at once
        self._block = min(max(_BLOCK_BYTES // (lanes * self.column.nbytes), _STAGED), _BLOCK)
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Drop all steps."""
        with self._lock:
            self.steps = 0  # ever added to a lane
            self.position = 0  # after the step that was added last
            # Room for some finals; more is made when it is needed.
            self._store = self._make(self.length + self.length // 16 + _BLOCK)
            self._row: Array = np.full((self.length, self.lanes), -1, np.int64)  # of each observation in its lane
            self._low: Array = np.zeros(self.lanes, np.int64)  # no step needs a row before it
            self._written: Array = np.zeros(self.lanes, np.int64)  # rows in the store
            self._newest: Array = np.full(self.lanes, -1)  # the newest row among those staged; the store lacks it
            self._staged: Array = np.zeros((_STAGED + 2, self.lanes, *self.column.shape), self.column.dtype)

    def _make(self, depth: int) -> Store:
        return Store((self.column,), lanes=self.lanes, length=depth, slack=0)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        with self._lock:
            return self._store.nbytes + self._row.nbytes + self._staged.nbytes

    # ---------------------------------------------------------------- writing

    def add(self, observation: Any, next_observation: Any, position: int) -> None:
        """Store a step of every lane, arrays `[E, *shape]`, in place of the step at `position`.

        Args:
          next_observation: Ignored unless `paired`.
        Raises:
          ValueError: the shapes do not fit. Nothing was stored, as with any exception.
        Cost: a copy of both and a comparison; every eighth step a `Store.write`.
        """
        rows: Array = np.empty((2, self.lanes, *self.column.shape), self.column.dtype)
        rows[0] = observation
        if self.paired:
            rows[1] = next_observation
        with self._lock:
            if self._newest.max() >= _STAGED:
                self._flush()
            ends = self._newest < 0
            ends |= not self.paired or self._differ(self._staged[self._newest, self._lane], rows[0])
            at = self._newest + ends  # the newest row is the observation of this step, or a final before it
            self._staged[at[ends], self._lane[ends]] = rows[0, ends]
            if self.paired:
                self._staged[at + 1, self._lane] = rows[1]
            self._row[position] = self._written + at
            self._newest = at + self.paired
            self._count(1, position)

    def extend(self, observations: Array, next_observations: Array | None, position: Array) -> None:
        """Store steps of every lane, arrays `[N, E, *shape]`, in place of those at int64[N] `position`, as `add` does.

        An exception leaves the steps of the first blocks stored.
        """
        if len(position) == 1:
            following = None if next_observations is None else next_observations[0]
            return self.add(observations[0], following, int(position[0]))
        for start in range(0, len(position), self._block):
            part = slice(start, start + self._block)
            with self._lock:
                self._flush()
                following = None if next_observations is None else next_observations[part]
                self._extend(observations[part], following, position[part])

    def _extend(self, rows: Array, following: Array | None, position: Array) -> None:
        number = len(rows)
        ends: Array = np.ones((number + 1, self.lanes), bool)  # whether a row of its own comes before
        if following is not None:
            ends[0] = (self._newest < 0) | self._differ(self._staged[0], rows[0])
            ends[1:-1] = self._differ(following[:-1], rows[1:])
        at = self._newest + np.cumsum(ends[:-1], axis=0) + self.paired * np.arange(number)[:, None]
        newest = at[-1] + self.paired
        staged: Array = np.empty((int(newest.max()) + 1, self.lanes, *self.column.shape), self.column.dtype)
        staged[0] = self._staged[0]
        staged[at, self._lane] = rows
        if following is not None:
            last, lane = np.nonzero(ends[1:])
            staged[at[last, lane] + 1, lane] = following[last, lane]
        self._make_room(newest)
        row = self._written + at
        self._write(staged, newest)
        self._row[position] = row
        self._count(number, int(position[-1]))

    def _count(self, number: int, position: int) -> None:
        self.steps += number
        self.position = (position + 1) % self.length

    def _differ(self, rows: Array, others: Array) -> Array:
        """Return bool[..., E]: which rows `[..., E, *shape]` differ in a byte."""
        shape = (*rows.shape[: rows.ndim - len(self.column.shape)], self.column.nbytes // self._word)
        one, other = (np.ascontiguousarray(a).reshape(-1).view(f"u{self._word}").reshape(shape) for a in (rows, others))
        return np.asarray((one != other).any(axis=-1))

    def _flush(self) -> None:
        """Write all staged rows but the newest of each lane, which the next step may repeat."""
        if self._newest.max() > 0:
            self._make_room(self._newest)
            self._write(self._staged, self._newest)

    def _write(self, rows: Array, newest: Array) -> None:
        """Write rows before int64[E] `newest`, and keep those at `newest`."""
        number = int(newest.max())
        if number:
            keep = np.arange(number)[:, None] < newest
            self._store.write([rows[:number]], None if keep.all() else keep)
        self._staged[0] = rows[newest, self._lane]
        self._written += newest
        self._newest = np.zeros(self.lanes, np.int64)

    def _make_room(self, newest: Array) -> None:
        """Make a larger store if rows that steps need would expire when int64[E] `newest` are written."""
        after = self._written + newest
        if (after - self._low).max() > self._store.length:
            self._low = np.where(self._row < 0, after, self._row).min(axis=0)
            if (after - self._low).max() > self._store.length:
                self._rebuild(int(newest.max()))

    def _rebuild(self, number: int) -> None:
        """Copy the rows that steps need to a new store, which has room for `number` more."""
        used = []  # by lane, rows in order
        for lane in range(self.lanes):
            row = self._row[:, lane][self._row[:, lane] >= 0]
            row = np.unique(np.concatenate([row, row + 1]) if self.paired else row)
            used.append(row[row < self._written[lane]])
        written = np.array([len(row) for row in used])
        most = int(written.max())
        store = self._make(most + most // 4 + number + _BLOCK)
        block = self._block
        for start in range(0, most, block):
            row = np.stack([np.resize(row[start : start + block], block) for row in used], axis=1)
            keep = start + np.arange(block)[:, None] < written
            rows: Array = np.empty((*row.shape, *self.column.shape), self.column.dtype)
            self._store.read([(0, np.where(keep, self._tickets.of(self._lane, row), np.uint64(0)), rows)])
            store.write([rows], None if keep.all() else keep)
        for lane, row in enumerate(used):
            old = self._row[:, lane]
            stored = (old >= 0) & (old < self._written[lane])
            moved = old + written[lane] - self._written[lane]
            self._row[:, lane] = np.where(stored, np.searchsorted(row, old), np.where(old < 0, -1, moved))
        self._store.close()
        self._store, self._written, self._low = store, written, np.zeros(self.lanes, np.int64)

    # ---------------------------------------------------------------- reading

    def read(self, position: Array, lane: Array, offsets: tuple[int, ...] = (0, 1)) -> list[Array]:
        """Return observations (offset 0) and next observations (offset 1) of steps, `[M, *shape]` each.

        Args:
          position: int64[M], 0 to `length - 1`; zeros are returned for one that was not written.
          lane: int64[M], 0 to `lanes - 1`.
        Raises:
          IndexError: a position or lane is out of range.
          StoreCorrupted: stored bytes are damaged.
        Cost: one `Store.read`, in which rows of both offsets are decoded once.
        """
        with self._lock:
            row = self._row[position, lane]
            written, present = self._written[lane], row >= 0
            rows = row + np.array(offsets)[:, None]
            stored = rows < written
            tickets = np.where(present & stored, self._tickets.of(lane, rows), np.uint64(0))
            outs: Array = np.empty((*rows.shape, *self.column.shape), self.column.dtype)
            found = self._store.read([(0, tickets, outs)])
            assert found.all()
            if not stored.all():
                which, at = np.nonzero(present & ~stored)
                outs[which, at] = self._staged[(rows - written)[which, at], lane[at]]
        return list(outs)

    # ---------------------------------------------------------------- saving

    def to_arrays(self) -> dict[str, Any]:
        """Return everything but the arguments as flat arrays, as `Store.to_arrays` does."""
        with self._lock:
            self._flush()
            where = np.array([self._store.length, self.steps, self.position], np.int64)
            indices = {"where": where, "row": self._row, "written": self._written, "newest": self._staged[0]}
            stored = {f"store:{name}": array for name, array in self._store.to_arrays().items()}
            return {name: np.copy(array) for name, array in indices.items()} | stored

    def restore(self, arrays: Sources) -> None:
        """Replace the steps by those of arrays that `to_arrays` returned.

        Raises:
          ValueError: the arrays do not fit together, or are those of other arguments.
          StoreCorrupted: as for `Store.from_arrays`.
        """
        depth, steps, position = expect(arrays, "where", np.int64, (3,)).tolist()
        row = expect(arrays, "row", np.int64, (self.length, self.lanes)).copy()
        written = expect(arrays, "written", np.int64, (self.lanes,)).copy()
        newest = expect(arrays, "newest", self.column.dtype, (self.lanes, *self.column.shape))
        stored = within(arrays, "store:")
        store = Store.from_arrays((self.column,), stored, lanes=self.lanes, length=depth, slack=0)
        low, high = np.maximum(written - depth, 0), written - self.paired
        invalid = (row >= 0) & ((row < low) | (row > high))
        if invalid.any() or (row < -1).any() or steps < 0 or not 0 <= position < self.length:
            raise unfit("steps name rows that are missing", "rows of the store")
        if not np.array_equal(expect(stored, "count", np.int64, (self.lanes,)), written):
            raise unfit("the store has other rows", f"{written.tolist()}")
        with self._lock:
            self._store, self.steps, self.position = store, steps, position
            self._row, self._low, self._written = row, low, written
            self._staged[0] = newest
            self._newest = np.full(self.lanes, 0 if steps else -1)

    def __getstate__(self) -> dict[str, Any]:
        arrays = {name: np.asarray(array) for name, array in self.to_arrays().items()}
        column = self.column
        settings = (self.length, self.lanes, column.shape, column.dtype, column.codec, self.paired)
        return {"arguments": settings, "arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(*state["arguments"])  # type: ignore[misc]
        self.restore(state["arrays"])
