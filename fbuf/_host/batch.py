"""A batch of rows on its way into the store: which rows of which lanes, and their places in the stream.

Rows of a lane are counted from 0. Lanes that move in step and keep every row are common enough (a vector of
environments) for slices; everything else goes through index arrays, made once a batch for all columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fbuf._host.types import Array


@dataclass
class Batch:
    """Rows on their way in, `[N, E, *shape]` a column, and where they go."""

    rows: Sequence[Array]
    keep: Array | None  # bool[N, E]; None: all
    before: Array  # int64[E], rows of each lane until now
    after: Array  # int64[E]
    uniform: bool  # all lanes are level and keep all, so that slices will do
    low: tuple[Array, Array] | None = None  # int64[E], first rows to keep, before and after; None: by depth
    # Where rows lie in no order: int64[N], their places, which stand for counts of a single lane (then E is 1, all are kept,
    # and `before` and `after` only say how many there are), and those of them that hold a row until now.
    at: Array | None = None
    gone: Array | None = None
    names: Array | None = (
        None  # of the rows that are written as they are: what goes into their checksums (`fbuf._host.columns.row_checksums`)
    )
    _picks: dict[int, Array] = field(default_factory=dict)
    _places: tuple[Array, Array, Array] | None = None

    def places(self) -> tuple[Array, Array, Array]:
        """Of every kept row: its place on axis 0, its lane, its count in the lane."""
        if self._places is None:
            n, e = self.rows[0].shape[:2]
            if self.at is not None:
                step, lane, count = np.arange(n), np.zeros(n, np.int64), self.at
            elif self.keep is None:
                step, lane = np.divmod(np.arange(n * e), e)
                count = self.before[lane] + step
            else:
                step, lane = np.nonzero(self.keep)
                count = (self.before + np.cumsum(self.keep, axis=0) - 1)[step, lane]
            self._places = step, lane, count
        return self._places

    def lane(self, rows: Array, lane: int, start: int, stop: int) -> Array:
        """Kept rows start..stop of a lane, C-contiguous; a view where the input allows."""
        if self.keep is None:
            return np.ascontiguousarray(rows[start:stop, lane])
        picks = self._picks.get(lane)
        if picks is None:
            picks = self._picks[lane] = np.flatnonzero(self.keep[:, lane])
        return np.ascontiguousarray(rows[picks[start:stop], lane])


def ranges(start: Array, stop: Array) -> tuple[Array, Array]:
    """(lane, number) for start[lane] <= number < stop[lane]."""
    size = np.maximum(stop - start, 0)
    lane = np.repeat(np.arange(len(size)), size)
    within = np.arange(len(lane)) - np.repeat(np.cumsum(size) - size, size)
    return lane, start[lane] + within
