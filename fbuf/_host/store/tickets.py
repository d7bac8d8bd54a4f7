"""The numbers of rows in streams: that of row `count` of a lane is `count * E + lane + 1`, counted from a first row.

0 stands for no row, and numbers with bit 63 set are changed rows (`fbuf._host.store.row_updates`), so 2^63 / E rows a lane
have one.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from fbuf._host.types import Array


class Tickets:
    """Tickets of `lanes` lanes, of which the newest `depth` rows can be read.

    Args:
      first: What row 0 of each lane counts as.
    """

    def __init__(self, lanes: int, depth: int, first: int) -> None:
        self.lanes = lanes
        self.depth = depth
        self.first = first
        self._base = first * lanes + 1  # of row 0 of lane 0

    def of(self, lane: Array, count: Array) -> Array:
        """Tickets uint64[...] of rows `count` of lanes, int64[...]."""
        number = count.astype(np.uint64) * np.uint64(self.lanes)
        return cast(Array, number + lane.astype(np.uint64) + np.uint64(self._base))

    def of_batch(self, keep: Array | None, n: int, before: Array) -> Array:
        """Tickets uint64[n, E] of rows that follow those of their lane, int64[E] `before`; 0 where not bool[n, E] `keep`."""
        step = np.arange(n)[:, None] if keep is None else np.cumsum(keep, axis=0) - 1
        tickets = self.of(np.arange(self.lanes), before + step)
        return tickets if keep is None else np.where(keep, tickets, np.uint64(0))

    def find(self, tickets: Array, rows: Array) -> tuple[Array, Array, Array]:
        """Lane and count, int64[...], and whether that row can be read when the lanes have int64[E] `rows`; else 0, 0."""
        number = tickets - np.uint64(self._base)  # wraps below the base, to counts beyond any lane's
        if self.lanes == 1:
            count, lane = number, np.zeros(number.shape, np.int64)
        else:
            count, rest = np.divmod(number, np.uint64(self.lanes))
            lane = rest.astype(np.int64)
        high = rows.astype(np.uint64)
        low = np.maximum(rows - self.depth, 0).astype(np.uint64)
        there = (count < high[lane]) & (count >= low[lane])
        return np.where(there, lane, 0), np.where(there, count, 0).astype(np.int64), there
