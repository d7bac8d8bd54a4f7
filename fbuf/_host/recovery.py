"""Which rows a store goes on with when some of those it counts are not what was written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fbuf._host.types import Array

Lost = tuple[Array, Array]
"""Lanes and counts int64[M] of rows that are not there, or are others."""


def longest(low: Array, count: Array, length: int, lost: Sequence[Lost], chunks: Sequence[int]) -> tuple[Array, Array]:
    """The longest run of whole rows of each lane, the newest of several.

    Args:
      low: int64[E], the first row of each lane that is counted.
      count: int64[E], the row after the last.
      length: Rows of a lane that states name.
      lost: By column.
      chunks: Rows a chunk, of the columns that are encoded: such a lane ends between two chunks, or where it ended.
    Returns:
      int64[E], rows each lane counts from now on, and int64[E], how many of its newest are held (at most `length`).
    """
    held = np.minimum(count - low, length)
    count = count.copy()
    lanes = np.concatenate([np.zeros(0, np.int64), *(lane for lane, _ in lost)])
    rows = np.concatenate([np.zeros(0, np.int64), *(row for _, row in lost)])
    for lane in np.unique(lanes).tolist():
        end = int(count[lane])
        edges = np.concatenate([[int(low[lane]) - 1], np.unique(rows[lanes == lane]), [end]])
        sizes = np.diff(edges) - 1
        best = len(sizes) - 1 - int(np.argmax(sizes[::-1]))
        first, stop = int(edges[best]) + 1, _between_chunks(int(edges[best + 1]), end, chunks)
        number = min(stop - first, length)
        # A lane whose oldest row lies at position 0 would look like one that never lost a row.
        if 0 < number < stop and number < length and (stop - number) % length == 0:
            number -= 1
        count[lane], held[lane] = (stop, number) if number > 0 else (0, 0)
    return count, held


def _between_chunks(stop: int, end: int, chunks: Sequence[int]) -> int:
    while True:
        cut = min((stop // k * k for k in chunks if stop < end // k * k), default=stop)
        if cut == stop:
            return stop
        stop = cut
