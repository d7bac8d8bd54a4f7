"""A host column as it is: a ring of rows, for leaves that are not compressed or do not compress.

Source: the pages of a new array are committed by the system as they are first written, so a ring costs what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.batch import Batch
from fbuf._host.columns.dirty_blocks import Tracked
from fbuf._host.interfaces import Part
from fbuf._host.memory.lazy_array import Lazy
from fbuf._host.types import Array


class Unstaged:
    """What a ring knows of a batch beforehand: nothing, it takes rows as they come."""

    incompressible = False


class Ring(Part):
    """The newest `depth` rows of each lane, as they are. Pages are committed as they are first written."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], lanes: int, depth: int) -> None:
        self.array: Array = np.empty((depth, lanes, *shape), dtype)
        self.row = self.array.nbytes // (depth * lanes)
        self.depth = depth
        self.lanes = lanes
        self.touched = 0  # rows a lane written so far, at most depth
        self._tracked = Tracked(depth, lanes * self.row)

    @property
    def nbytes(self) -> int:
        """Bytes written to so far; the rest of the array is address space only."""
        return self.array.nbytes // max(self.depth, 1) * self.touched

    def size(self, count: Array) -> int:
        """`nbytes`, whatever is live."""
        return self.nbytes

    def stage(self, batch: Batch, rows: Array) -> Unstaged:
        """Nothing to prepare."""
        return Unstaged()

    def commit(self, batch: Batch, rows: Array, staged: Unstaged) -> None:
        """Takes the newest rows of a batch."""
        depth, array = self.depth, self.array
        self.touched = min(max(self.touched, int(batch.after.max())), depth)
        if batch.at is not None:
            self._tracked.touch_at(batch.at)
            array[batch.at, 0] = rows[:, 0]
            return
        if batch.uniform:
            stop = int(batch.after[0])
            start = max(int(batch.before[0]), stop - depth)
            rows = rows[len(rows) - (stop - start) :]
            first = start % depth
            head = min(depth - first, len(rows))
            self._tracked.touch(first, first + head)
            self._tracked.touch(0, len(rows) - head)
            array[first : first + head] = rows[:head]
            array[: len(rows) - head] = rows[head:]
            return
        step, lane, count = batch.places()
        new = count >= batch.after[lane] - depth
        self._tracked.touch_at(count[new] % depth)
        array[count[new] % depth, lane[new]] = rows[step[new], lane[new]]

    def resume(self, count: Array) -> None:
        """Rows of no bytes lie in no file: as many as the lanes have are there again."""
        self.touched = min(int(count.max()), self.depth)

    def put(self, lane: Array, count: Array, values: Array) -> None:
        """Takes rows `[M, *shape]`, or their bytes uint8[M, row], of lanes and counts int64[M]."""
        self._tracked.touch_at(count % self.depth)
        data = np.ascontiguousarray(values).reshape(-1).view(self.array.dtype)
        self.array[count % self.depth, lane] = data.reshape(-1, *self.array.shape[2:])
        self.touched = min(max(self.touched, int(count.max(initial=-1)) + 1), self.depth)

    @property
    def places(self) -> int:
        """Rows of a lane there is room for."""
        return self.depth

    def saved(self, count: Array) -> Lazy:
        """uint8[rows, E, bytes]: row `count` of a lane at `count % places`."""
        array, row, lanes = self.array, self.row, self.lanes

        def read(start: int, stop: int) -> Array:
            return array[start:stop].reshape(-1).view(np.uint8).reshape(stop - start, lanes, row).copy()

        return self._tracked.snapshot((self.touched, lanes, row), np.uint8, read)

    def restore(self, start: int, rows: Array) -> None:
        """Fills places from `start` on with uint8[rows, E, bytes]."""
        self._tracked.touch(start, start + len(rows))
        if rows.size:
            self.array[start : start + len(rows)].reshape(-1).view(np.uint8)[:] = rows.reshape(-1)

    def fetch(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> Gather:
        """How to fetch rows, as `Part.fetch` describes it."""
        return Gather(self.array, count % self.depth * self.lanes + lane, starts)


@dataclass
class Gather:
    """Rows to copy, all of them: those that are not there are somebody else's."""

    array: Array
    at: Array  # int64[M], place of each row
    starts: Array

    volatile = True  # the ring goes on

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fills the requests' outputs."""
        if not self.array.nbytes:
            return
        table = self.array.reshape(-1).view(np.uint8).reshape(self.array.shape[0] * self.array.shape[1], -1)
        for at, out in zip(np.split(self.at, self.starts[1:]), outs, strict=True):
            if len(at):
                # mode="raise", the default, would gather into a temporary first.
                np.take(table, at, axis=0, out=np.frombuffer(out, np.uint8).reshape(len(at), -1), mode="clip")
