"""Keep a column as it is, in a ring of rows; snapshots of an array that is overwritten in place.

A snapshot costs nothing when it is taken. A writer calls `touch` first, which copies the blocks that snapshots still need:
never more than the array. A block is named by how often it was written, so an unchanged block is not read again. Pages of a
new array are committed as they are first written, so a ring costs what it holds.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.memory.lazy_array import Identity, Lazy, block_rows
from fbuf._host.types import Array, Batch, ColumnData, DType, Shape, without_traceback


class _Snapshot:
    """Rows as they were, for one writer and any number of readers."""

    def __init__(self, read: Callable[[int, int], Array], rows: int, block: int) -> None:
        self._read, self._rows, self._block = read, rows, block
        self._kept: dict[int, Array] = {}  # blocks that were written since, as they were
        self._lock = threading.Lock()
        self._failed: Exception | None = None

    def keep(self, blocks: Sequence[int]) -> None:
        """Copy blocks that are about to be written."""
        with self._lock:
            for at in blocks:
                first = at * self._block
                if first < self._rows and at not in self._kept and self._failed is None:
                    try:
                        self._kept[at] = self._read(first, min(first + self._block, self._rows))
                    except Exception as error:  # no memory, a broken disk, damaged rows: who writes need not hear of it
                        self._failed = without_traceback(error)
                        self._kept.clear()

    def read(self, start: int, stop: int) -> Array:
        """Return rows. Raises MemoryError, or what reading raised, if overwritten rows could not be kept."""
        found: list[Array] = []
        while start < stop or not found:
            at = start // self._block
            first, end = at * self._block, min((at + 1) * self._block, stop)
            with self._lock:  # a write waits for as long as it takes to copy a block
                if isinstance(self._failed, MemoryError):
                    raise MemoryError("fbuf: no memory to keep rows that were replaced during a save; save again.")
                if self._failed is not None:
                    raise self._failed
                kept = self._kept.get(at)
                found.append(self._read(start, end) if kept is None else kept[start - first : end - first].copy())
            start = max(end, start + 1)
        return found[0] if len(found) == 1 else np.concatenate(found)


class DirtyBlocks:
    """Count the writes to each block of an array of `rows` rows, and keep what snapshots need of them."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self.block = block_rows(rows, nbytes)
        # The number of the last write to each.
        self._written: Array = np.zeros(-(-max(rows, 1) // self.block), np.int64)
        self._writes = 0
        self._snapshots: list[weakref.ref[_Snapshot]] = []
        self._identity = Identity()

    def touch(self, start: int, stop: int) -> None:
        """Announce a write to rows `start` to `stop`."""
        if stop > start:
            blocks = slice(start // self.block, (stop - 1) // self.block + 1)
            if self._snapshots:
                self._keep(range(blocks.start, blocks.stop))
            self._writes += 1
            self._written[blocks] = self._writes

    def touch_at(self, rows: Array) -> None:
        """Announce a write to rows int64[M]."""
        if len(rows):
            blocks = rows // self.block
            if self._snapshots:
                self._keep(np.unique(blocks).tolist())
            self._writes += 1
            self._written[blocks] = self._writes

    def _keep(self, blocks: Sequence[int]) -> None:
        alive = [(reference, snapshot) for reference in self._snapshots if (snapshot := reference()) is not None]
        self._snapshots = [reference for reference, _ in alive]
        for _, snapshot in alive:
            snapshot.keep(blocks)

    def snapshot(self, shape: tuple[int, ...], dtype: Any, read: Callable[[int, int], Array]) -> Lazy:
        """Return the first `shape[0]` rows as they are now.

        Args:
          read: (start, stop) -> rows of an array as they are when it is called; never more than a block of them.
        """
        snapshot = _Snapshot(read, shape[0], self.block)
        self._snapshots = [r for r in self._snapshots if r() is not None] + [weakref.ref(snapshot)]
        marks, name, number = [], str(self._identity), -(-shape[0] // self.block)
        for at, written in enumerate(self._written[:number].tolist()):
            rows = min(self.block, shape[0] - at * self.block)
            marks.append(f"{name}:{at}:{written}:{rows}")
        return Lazy(shape, dtype, snapshot.read, block=self.block, marks=marks)


class RawColumn(ColumnData):
    """The newest `depth` rows of each lane, as they are."""

    def __init__(self, shape: Shape, dtype: DType, lanes: int, depth: int) -> None:
        self.array: Array = np.empty((depth, lanes, *shape), dtype)
        self.row = self.array.nbytes // (depth * lanes)
        self.depth = depth
        self.lanes = lanes
        self.touched = 0  # rows a lane written so far, at most depth
        self._tracked = DirtyBlocks(depth, lanes * self.row)

    def size(self, count: Array) -> int:
        """Return the bytes written to so far, of expired rows too; the rest of the array is address space only."""
        return self.array.nbytes // max(self.depth, 1) * self.touched

    def commit(self, batch: Batch, rows: Array, staged: None) -> None:
        """Copy the newest rows of a batch."""
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
        """Count rows of no bytes, which have no file."""
        self.touched = min(int(count.max()), self.depth)

    def put(self, lane: Array, count: Array, values: Array) -> None:
        """Write rows `[M, *shape]`, or their bytes uint8[M, row], at lanes and counts int64[M]."""
        self._tracked.touch_at(count % self.depth)
        data = np.ascontiguousarray(values).reshape(-1).view(self.array.dtype)
        self.array[count % self.depth, lane] = data.reshape(-1, *self.array.shape[2:])
        self.touched = min(max(self.touched, int(count.max(initial=-1)) + 1), self.depth)

    @property
    def places(self) -> int:
        """Return the number of rows a lane has room for."""
        return self.depth

    def saved(self, count: Array) -> Lazy:
        """Return uint8[rows, E, bytes]: row `count` of a lane is at `count % places`."""
        array, row, lanes = self.array, self.row, self.lanes

        def read(start: int, stop: int) -> Array:
            return array[start:stop].reshape(-1).view(np.uint8).reshape(stop - start, lanes, row).copy()

        return self._tracked.snapshot((self.touched, lanes, row), np.uint8, read)

    def restore(self, start: int, rows: Array) -> None:
        """Fill places from `start` on with uint8[rows, E, bytes]."""
        self._tracked.touch(start, start + len(rows))
        if rows.size:
            self.array[start : start + len(rows)].reshape(-1).view(np.uint8)[:] = rows.reshape(-1)

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> RawFetch:
        """Say how to fetch rows, as `ColumnData.fetch` describes it."""
        return RawFetch(self.array, count % self.depth * self.lanes + lane, starts)


@dataclass
class RawFetch:
    """Copy rows, including those that are not there: the store zeroes them."""

    array: Array
    at: Array  # int64[M], place of each row
    starts: Array

    may_be_overwritten = True  # the ring wraps around

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fill the outputs of the requests."""
        if not self.array.nbytes:
            return
        table = self.array.reshape(-1).view(np.uint8).reshape(self.array.shape[0] * self.array.shape[1], -1)
        starts = self.starts.tolist()
        for start, stop, out in zip(starts, [*starts[1:], len(self.at)], outs, strict=True):
            at = self.at[start:stop]
            if len(at):
                # mode="raise", the default, would gather into a temporary first.
                np.take(table, at, axis=0, out=np.frombuffer(out, np.uint8).reshape(len(at), -1), mode="clip")
