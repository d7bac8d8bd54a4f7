"""Where in a stream of frames the rows of a lane end: one byte a row, and a count every 64 rows.

A row is the newest frames of its lane at the time it came, so the number of frames up to it says all. Rejected: that
number for every row (8 bytes, 5 times more than the chunk index of its frame).
"""

from __future__ import annotations

import numpy as np

from fbuf._host.arrays import Array, StoreCorrupted

_BLOCK = 64  # rows


class RowEnds:
    """The newest `depth` rows of each lane and a few more: how many frames each added, and their sum."""

    def __init__(self, lanes: int, depth: int) -> None:
        self.blocks = depth // _BLOCK + 2
        self.added = np.zeros((self.blocks, lanes, _BLOCK), np.uint8)
        self.base = np.zeros((self.blocks, lanes), np.int64)  # frames before a block

    def size(self, count: Array) -> int:
        """Bytes written to when the lanes have `count` rows."""
        used = min(int(count.max(initial=0)) // _BLOCK + 1, self.blocks)
        return used * (self.added.nbytes + self.base.nbytes) // self.blocks

    def live(self, lane: Array, count: Array, depth: int) -> Array:
        """uint8[M], frames added by all live rows, lane by lane; the oldest of each adds the `depth` that it shows."""
        block, at = np.divmod(count, _BLOCK)
        added = self.added[block % self.blocks, lane, at]
        added[np.diff(lane, prepend=-1) != 0] = depth
        return added

    def restore(self, lane: Array, count: Array, added: Array, low: Array) -> None:
        """Enters what `live` gave; the oldest row of each lane shows frames from int64[E] `low` on."""
        oldest = np.flatnonzero(np.diff(lane, prepend=-1))
        end = np.cumsum(added, dtype=np.int64)
        end += np.repeat(low[lane[oldest]] + added[oldest] - end[oldest], np.diff(oldest, append=len(lane)))
        # What the oldest row's block held before it is not known, nor needed.
        self.base[count[oldest] // _BLOCK % self.blocks, lane[oldest]] = low[lane[oldest]]
        self.write(lane, count, added, end)

    def write(self, lane: Array, count: Array, added: Array, end: Array) -> None:
        """Enters rows, each lane's in order: frames added, and their number up to the row. Cannot fail."""
        block, at = np.divmod(count, _BLOCK)
        block %= self.blocks
        self.added[block, lane, at] = added
        first = at == 0
        self.base[block[first], lane[first]] = (end - added)[first]

    def of(self, lane: Array, count: Array, rows: Array, frames: Array, checked: bool = True) -> Array:
        """int64[M], frames up to each row.

        Args:
          rows: int64[E], rows of each lane now.
          frames: int64[E], their frames.
        Raises:
          StoreCorrupted: frames added do not sum up to what the next block begins with, unless not `checked`.
        """
        block, at = np.divmod(count, _BLOCK)
        place = block % self.blocks
        added = self.added[place, lane]
        position = np.arange(_BLOCK)
        base = self.base[place, lane]
        if checked:
            left = (rows[lane] - block * _BLOCK)[:, None]
            then = np.where(left[:, 0] > _BLOCK, self.base[(block + 1) % self.blocks, lane], frames[lane])
            total = base + np.where(position < left, added, 0).sum(axis=1, dtype=np.int64)
            if (total != then).any():
                raise StoreCorrupted(
                    f"Store.read: rows of a lane end at frame {int(total[total != then][0])}; expected "
                    f"{int(then[total != then][0])}. The index was damaged: load the last checkpoint with fbuf.load(path)."
                )
        return np.asarray(base + np.where(position <= at[:, None], added, 0).sum(axis=1, dtype=np.int64))
