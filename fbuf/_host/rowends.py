"""Where in a stream of frames the rows of a lane end: one byte a row, and a count every 64 rows.

A row is the newest frames of its lane at the time it came, so the number of frames up to it says all. Rejected: that
number for every row (8 bytes, 5 times more than the chunk index of its frame).
"""

from __future__ import annotations

import numpy as np

from fbuf._host.arrays import Array, StoreCorrupted
from fbuf._host.batch import ranges

_BLOCK = 64  # rows
_BLOCKS_AT_ONCE = 1024  # blocks


class RowEnds:
    """The newest `depth` rows of each lane and a few more: how many frames each added, and their sum."""

    def __init__(self, lanes: int, depth: int) -> None:
        self.blocks = depth // _BLOCK + 2
        self.added = np.zeros((self.blocks, lanes, _BLOCK), np.uint8)
        self.base = np.zeros((self.blocks, lanes), np.int64)  # frames before a block

    def size(self, count: Array) -> int:
        """Bytes written to when the lanes have `count` rows."""
        return self.used(count) * (self.added.nbytes + self.base.nbytes) // self.blocks

    def saved(self, first: Array, count: Array, depth: int) -> Array:
        """uint8[blocks, E, 64], frames added by rows `first` to `count` of each lane, copied; by the first of them `depth`."""
        used = self.used(count)
        out = self.added[:used].copy()
        end = first + self.blocks * _BLOCK
        lane, row = ranges(
            count, end if used == self.blocks else np.minimum(end, used * _BLOCK)
        )  # of rows that are gone
        out[row // _BLOCK % self.blocks, lane, row % _BLOCK] = 0
        lane = np.flatnonzero(count > first)
        out[first[lane] // _BLOCK % self.blocks, lane, first[lane] % _BLOCK] = depth
        return out

    def used(self, count: Array) -> int:
        """Blocks written to when the lanes have `count` rows."""
        return min(int(count.max(initial=0)) // _BLOCK + 1, self.blocks)

    def restore(self, saved: Array, first: Array, count: Array, low: Array, depth: int) -> Array:
        """Enters what `saved` gave of rows `first` to `count` of each lane; int64[E], frames up to the last of them.

        Args:
          low: int64[E], the first frame that the oldest row shows.
          depth: Frames that it shows.
        """
        end = low.copy()
        for start in range(int(first.min()) // _BLOCK, -(-int(count.max()) // _BLOCK), _BLOCKS_AT_ONCE):
            bounds = start * _BLOCK, (start + _BLOCKS_AT_ONCE) * _BLOCK
            lane, row = ranges(np.clip(first, *bounds), np.clip(count, *bounds))
            if not len(row):
                continue
            block, at = np.divmod(row, _BLOCK)
            added = saved[block % self.blocks, lane, at]
            added[row == first[lane]] = depth
            begin = np.flatnonzero(np.diff(lane, prepend=-1))
            total = np.cumsum(added, dtype=np.int64)
            size = np.diff(begin, append=len(lane))
            total += np.repeat(end[lane[begin]] - (total[begin] - added[begin]), size)
            # What the oldest row's block held before it is not known, nor needed.
            oldest = row == first[lane]
            self.base[block[oldest] % self.blocks, lane[oldest]] = low[lane[oldest]]
            self.write(lane, row, added, total)
            end[lane[begin]] = total[begin + size - 1]
        return end

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
