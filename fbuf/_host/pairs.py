"""Store observations and next observations of parallel environments, each row once.

The rows of a lane follow one another in a `Store`. The next observation of a step is the row after its observation: the
observation of the step that follows or, if the two differ in any byte, a final: a row of its own. Finals are the last rows
of episodes and of transitions out of order; they expire with the step that they end. New rows are staged, and written eight
at a time, because a write costs more than compressing a row.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from fbuf._host.codecs.codec import Codec
from fbuf._host.columns.spec import Column
from fbuf._host.interfaces import Tickets
from fbuf._host.store.store import Store
from fbuf._host.types import Array

_STAGED = 8  # rows a write
_COPIED = 64  # rows of a lane at once


class ObservationPairs:
    """The newest `length` steps of each lane: what was observed, and what next. Thread-safe.

    Args:
      length: Steps a lane.
      lanes: E, environments that step together.
      shape, dtype: Of one observation of one lane, at least one byte.
      codec: Of the rows; None: as they are. With `Zstd` rows that are stacks of frames are recognised, and each frame is
        stored once.
    """

    def __init__(self, length: int, lanes: int, shape: tuple[int, ...], dtype: Any, codec: Codec | None) -> None:
        self.length, self.lanes = length, lanes
        self.column = Column("observation", shape, dtype, codec, stacks=True)
        self._lane = np.arange(lanes)
        self._tickets = Tickets(lanes, length, 0)
        self._word = next(size for size in (8, 4, 2, 1) if self.column.nbytes % size == 0)  # compared at once
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Drop all steps."""
        with self._lock:
            self.steps = 0  # ever added to a lane
            # Room for some finals; more is made when it is needed.
            self._store = self._make(self.length + self.length // 16 + 2 * _STAGED)
            self._row: Array = np.zeros((self.length, self.lanes), np.int64)  # of each step's observation in its lane
            self._written: Array = np.zeros(self.lanes, np.int64)  # rows in the store
            self._newest: Array = np.full(self.lanes, -1)  # the newest row among those staged; the store lacks it
            self._staged: Array = np.zeros((_STAGED + 2, self.lanes, *self.column.shape), self.column.dtype)

    def _make(self, depth: int) -> Store:
        return Store((self.column,), lanes=self.lanes, length=depth, slack=0)

    @property
    def position(self) -> int:
        """Return the position of the step that is added next, 0 to `length - 1`."""
        return self.steps % self.length

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        with self._lock:
            return self._store.nbytes + self._row.nbytes + self._staged.nbytes

    # ---------------------------------------------------------------- writing

    def add(self, observation: Any, next_observation: Any, *, replace: bool = False) -> None:
        """Store a step of every lane, arrays `[E, *shape]`, at `position`; the oldest step is dropped if there is no room.

        Args:
          replace: Replace the newest step instead.
        Raises:
          ValueError: the shapes do not fit. Nothing was stored, as with any exception.
        Cost: a copy of both and a comparison; every eighth step a `Store.write`.
        """
        rows: Array = np.empty((2, self.lanes, *self.column.shape), self.column.dtype)
        rows[0], rows[1] = observation, next_observation
        with self._lock:
            if self._newest.max() >= _STAGED:
                self._flush()
            ends = (self._newest < 0) | self._differ(self._staged[self._newest, self._lane], rows[0])
            at = self._newest + ends  # the newest row is the observation of this step, or a final before it
            self._staged[at[ends], self._lane[ends]] = rows[0, ends]
            self._staged[at + 1, self._lane] = rows[1]
            step = self.steps - replace
            self._row[step % self.length] = self._written + at
            self._newest = at + 1
            self.steps = step + 1

    def _differ(self, rows: Array, others: Array) -> Array:
        """Return bool[E]: which rows differ in a byte."""
        one, other = (a.reshape(-1).view(f"u{self._word}").reshape(self.lanes, -1) for a in (rows, others))
        return np.asarray((one != other).any(axis=1))

    def _flush(self) -> None:
        """Write all staged rows but the newest of each lane, which the next step may repeat."""
        number = int(self._newest.max())
        if number <= 0:
            return
        needed = int((self._written + self._newest - self._oldest()).max())
        if needed > self._store.length:
            self._grow(max(needed, min(needed + needed // 4, 2 * self.length)) + 2 * _STAGED)
        keep = np.arange(number)[:, None] < self._newest
        self._store.write([self._staged[:number]], None if keep.all() else keep)
        self._staged[0] = self._staged[self._newest, self._lane]
        self._written += self._newest
        self._newest = np.zeros(self.lanes, np.int64)

    def _oldest(self) -> Array:
        """Return int64[E], the first row of each lane that a step needs."""
        return np.asarray(self._row[self.position])  # 0, the first row, until the step at this position was added

    def _grow(self, depth: int) -> None:
        """Move the rows that steps need to a store of `depth` rows a lane."""
        low, store = self._oldest().copy(), self._make(depth)
        for start in range(0, int((self._written - low).max()), _COPIED):
            row = low + start + np.arange(_COPIED)[:, None]
            keep = row < self._written
            rows: Array = np.empty((*row.shape, *self.column.shape), self.column.dtype)
            self._store.read([(0, np.where(keep, self._tickets.of(self._lane, row), np.uint64(0)), rows)])
            store.write([rows], None if keep.all() else keep)
        self._store.close()
        self._store = store
        self._row -= low
        self._written -= low

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
            written, there = self._written[lane], position < self.steps
            requests = []
            for offset in offsets:
                stored = there & (row + offset < written)
                tickets = np.where(stored, self._tickets.of(lane, row + offset), np.uint64(0))
                out: Array = np.empty((len(row), *self.column.shape), self.column.dtype)
                requests.append((0, tickets, out))
            found = self._store.read(requests)
            assert found.all()
            for offset, (_, _, out) in zip(offsets, requests, strict=True):
                staged = np.flatnonzero(there & (row + offset >= written))
                if len(staged):
                    out[staged] = self._staged[(row + offset - written)[staged], lane[staged]]
        return [out for _, _, out in requests]

    # ---------------------------------------------------------------- pickling

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self._flush()
            arrays = {name: np.asarray(array) for name, array in self._store.to_arrays().items()}
            own = {"length": self.length, "lanes": self.lanes, "column": self.column, "steps": self.steps}
            state = {"row": self._row, "written": self._written, "newest": self._staged[0], "depth": self._store.length}
            return own | {name: np.copy(value) for name, value in state.items()} | {"store": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        column, depth = state["column"], int(state["depth"])
        self.__init__(state["length"], state["lanes"], column.shape, column.dtype, column.codec)  # type: ignore[misc]
        self._store = Store.from_arrays((column,), state["store"], lanes=self.lanes, length=depth, slack=0)
        self.steps, self._row, self._written = state["steps"], state["row"], state["written"]
        self._staged[0] = state["newest"]
        self._newest = np.full(self.lanes, 0 if self.steps else -1)
