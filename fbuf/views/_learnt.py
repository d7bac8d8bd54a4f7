"""Find which rows the windows of a buffer learn, from the flags of all rows. NumPy, O(C); for summaries."""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._indexing.anchors import ANCHOR, RESET, START, TERMINATED

_FAR = 2**30


def learnt(
    flags: np.ndarray, *, length: int, burn_in: int, bootstrap: int, dilation: int, at: int, last_bit: int | None
) -> np.ndarray:
    """Return bool[L, E], rows that a window learns.

    Args:
      flags: uint8[L, E] of rows in order of arrival, 0 where there is none.
      last_bit: Flags of an episode's last row, which cuts windows; None: windows of open anchors are never cut.
    """
    rows, lanes = flags.shape
    anchor, lane = np.nonzero(flags & ANCHOR)
    index = np.arange(rows, dtype=np.int32)[:, None]
    first, last = np.zeros_like(anchor), np.full_like(anchor, length - 1)  # positions of each window that exist
    if last_bit is not None:
        began = np.maximum.accumulate(np.where(flags & START, index, np.int32(-_FAR)))[anchor, lane]
        first = at - np.minimum((anchor - began) // dilation, at)
        ends = np.minimum.accumulate(np.where(flags & last_bit, index, np.int32(_FAR))[::-1])[::-1][anchor, lane]
        last = at + np.minimum((ends - anchor) // dilation, length - 1 - at)

    def row(position: Any) -> np.ndarray:
        """Return the row at a position of each window."""
        return np.asarray(anchor + (position - at) * dilation)

    low, high = np.maximum(first, burn_in), last - bootstrap
    if burn_in:  # nothing before the first row of an episode is missing
        starts = np.minimum.accumulate(np.where(flags & START, index, np.int32(_FAR))[::-1])[::-1]
        begins = np.where(first > 0, first, -(-(starts[row(first), lane] - row(first)) // dilation))
        low = np.where(begins <= last, np.minimum(low, begins), low)
    if bootstrap:  # a terminated row needs no bootstrap rows
        ended = np.where(flags & TERMINATED, index, np.int32(-_FAR))
        ended = _per_residue(np.maximum.accumulate, ended, dilation)[row(last), lane]
        high = np.maximum(high, np.where(ended >= row(first), at + (ended - anchor) // dilation, high))
    some = low <= high
    size = (rows + dilation) * lanes
    opening = np.bincount((row(low) * lanes + lane)[some], minlength=size)
    closing = np.bincount(((row(high) + dilation) * lanes + lane)[some], minlength=size)
    cover = _per_residue(np.cumsum, (opening - closing).reshape(-1, lanes), dilation)[:rows]
    return np.asarray((cover > 0) & ((flags & RESET) == 0))


def _per_residue(scan: Any, values: np.ndarray, dilation: int) -> np.ndarray:
    """Return a scan over every `dilation`-th row of values [L, E]."""
    rows, lanes = values.shape
    padded = np.concatenate([values, np.zeros((-rows % dilation, lanes), values.dtype)])
    return np.asarray(scan(padded.reshape(-1, dilation, lanes), axis=0).reshape(-1, lanes)[:rows])
