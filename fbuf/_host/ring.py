"""A host column as it is: a ring of rows, for leaves that are not compressed or do not compress.

Source: the pages of a new array are committed by the system as they are first written, so a ring costs what it holds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._host.batch import Batch
from fbuf._host.codec import Array


class Ring:
    """The newest `depth` rows of each lane, as they are. Pages are committed as they are first written."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], lanes: int, depth: int) -> None:
        self.array: Array = np.empty((depth, lanes, *shape), dtype)
        self.row = self.array.nbytes // (depth * lanes)
        self.depth = depth
        self.lanes = lanes
        self.touched = 0  # rows a lane written so far, at most depth

    @property
    def nbytes(self) -> int:
        """Bytes written to so far; the rest of the array is address space only."""
        return self.array.nbytes // max(self.depth, 1) * self.touched

    def commit(self, batch: Batch, rows: Array) -> None:
        """Takes the newest rows of a batch."""
        depth, array = self.depth, self.array
        self.touched = min(max(self.touched, int(batch.after.max())), depth)
        if batch.uniform:
            stop = int(batch.after[0])
            start = max(int(batch.before[0]), stop - depth)
            rows = rows[len(rows) - (stop - start) :]
            first = start % depth
            head = min(depth - first, len(rows))
            array[first : first + head] = rows[:head]
            array[: len(rows) - head] = rows[head:]
            return
        step, lane, count = batch.places()
        new = count >= batch.after[lane] - depth
        array[count[new] % depth, lane[new]] = rows[step[new], lane[new]]

    def gather(self, lane: Array, count: Array, out: Array) -> None:
        """Copies rows, `count` int64[M] clipped into range by the caller, into `out` `[M, *shape]`."""
        if not out.nbytes:
            return
        at = count % self.depth * self.lanes + lane
        table = self.array.reshape(-1).view(np.uint8).reshape(self.depth * self.lanes, -1)
        # mode="raise", the default, would gather into a temporary first.
        np.take(table, at, axis=0, out=out.reshape(-1).view(np.uint8).reshape(len(at), -1), mode="clip")
