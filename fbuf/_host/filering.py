"""A host column as it is, in a file: the ring of `Ring` with spare places, so that no write touches a row that can be read.

Row `count` of a lane lies at place `count % places`, where `places` is `depth` and some to spare. A batch of no more rows than
are spare therefore falls on places of rows that have expired, and one that fails half-way, or is killed, leaves every other row
as it was; larger batches come in pieces (`room`). Rejected: a copy of the rows to undo a failed write (readers would see the
new ones meanwhile, and writing them back may fail too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.arrays import Array, flat
from fbuf._host.batch import Batch
from fbuf._host.files import File
from fbuf._host.part import Census
from fbuf._host.ring import Unstaged
from fbuf._host.source import Lazy
from fbuf._host.tracked import Tracked

_SPARE = 1024


def spare(depth: int) -> int:
    """Places a lane beyond its rows: a sixteenth, from 16 to 1024."""
    return max(16, min(depth // 16, _SPARE))


class FileRing:
    """The newest `depth` rows of each lane, as they are, in a file.

    Args:
      path: The file; a new one replaces what is there.
      fresh: Whether to make a new one.
      batch: Rows a lane that a batch may have at the least.
    Raises:
      OSError: it cannot be made or opened.
      ValueError: what is there is too small.
    """

    def __init__(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        lanes: int,
        depth: int,
        *,
        fresh: bool,
        batch: int = 0,
    ) -> None:
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        size = (depth + max(spare(depth), batch)) * lanes * self.row
        self.file = File(path, size if fresh else None)
        self.places = self.file.size // (lanes * self.row)
        if self.places <= depth:
            raise ValueError(
                f"Buffer.resume: {path} has {self.file.size} bytes; expected more than {depth * lanes * self.row}. It was "
                f"cut short: start a new store at another path."
            )
        self.table: Array = np.frombuffer(self.file.map(), np.uint8)[: self.places * lanes * self.row]
        self._tracked = Tracked(self.places, lanes * self.row)

    def due(self, count: Array) -> bool:
        """Nothing is compressed."""
        return False

    def lot(self, count: Array, least: int | None) -> None:
        """Nothing is compressed."""
        return None

    def room(self, count: Array) -> int:
        """Rows a lane that can be written at once, when the lanes have int64[E] `count` rows."""
        return self.places - min(int(count.max()), self.depth)

    def size(self, count: Array) -> int:
        """Nothing lies in memory but what the system keeps in its page cache."""
        return 0

    def census(self, count: Array) -> Census:
        """Nothing is encoded."""
        return Census()

    def stage(self, batch: Batch, rows: Array) -> Unstaged:
        """Writes the rows where only expired ones lay."""
        if batch.uniform:
            stop = int(batch.after[0])
            start = max(int(batch.before[0]), stop - self.depth)
            data = flat(np.ascontiguousarray(rows[len(rows) - (stop - start) :]))
            first, stride = start % self.places, self.lanes * self.row
            number = min(self.places - first, stop - start)
            self._tracked.touch(first, first + number)
            self._tracked.touch(0, stop - start - number)
            head = number * stride
            self.file.write(data[:head], first * stride)
            self.file.write(data[head:], 0)
        else:
            step, lane, count = batch.places()
            new = count >= batch.after[lane] - self.depth
            self.put(lane[new], count[new], rows[step[new], lane[new]])
        return Unstaged()

    def put(self, lane: Array, count: Array, values: Array) -> None:
        """Writes rows `[M, *shape]` of lanes and counts int64[M]."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, self.row)
        self._tracked.touch_at(count % self.places)
        self.file.scatter(data, count % self.places * self.lanes + lane)

    def reserve(self, staged: Unstaged) -> None:
        """Nothing to do: the rows are written."""

    def cancel(self, staged: Unstaged) -> None:
        """Nothing to undo: they lie where no row is."""

    def commit(self, batch: Batch, rows: Array, staged: Unstaged) -> None:
        """Nothing to do: the store's count says that they are there."""

    def compact(self, count: Array) -> None:
        """Nothing to give back."""

    def saved(self, count: Array) -> Lazy:
        """As `Ring.saved`, read from the file: nothing of it comes to lie in memory."""
        file, row, lanes = self.file, self.row, self.lanes

        def read(start: int, stop: int) -> Array:
            rows = np.empty((stop - start, lanes, row), np.uint8)
            file.fill(rows, start * lanes * row)
            return rows

        return self._tracked.snapshot((min(int(count.max()), self.places), lanes, row), np.uint8, read)

    def fetch(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> FileGather:
        """How to fetch rows, as `Part.fetch` describes it."""
        return FileGather(self.table, self.row, count % self.places * self.lanes + lane, there, starts)


@dataclass
class FileGather:
    """Rows to copy."""

    table: Array
    row: int
    at: Array  # int64[M], place of each row
    there: Array
    starts: Array

    volatile = True  # the ring goes on

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fills the requests' outputs."""
        table = self.table.reshape(-1, self.row)
        some = np.flatnonzero(self.there)
        if not len(some):
            return
        # Holes of the file are left alone: a row that is not there is read as one that is.
        places = self.at if len(some) == len(self.at) else np.where(self.there, self.at, self.at[some[0]])
        for at, out in zip(np.split(places, self.starts[1:]), outs, strict=True):
            if len(at):
                np.take(table, at, axis=0, out=np.frombuffer(out, np.uint8).reshape(len(at), -1), mode="clip")
