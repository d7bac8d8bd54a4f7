"""Which rows of a buffer become transitions of TED, where their next observation is, and where episodes end.

Worked out for all rows at once from the flags alone, some bytes a row, before any observation is read: the number of rows must
be known when a file is begun. The words are those of `fbuf.interop._ted`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fbuf.interop._read import Reader


class Plan(NamedTuple):
    """What becomes of each row, bool[T, E]."""

    keep: np.ndarray
    from_next: np.ndarray  # its next observation is that of the row after
    from_final: np.ndarray  # ... is the final one it holds
    terminated: np.ndarray
    truncated: np.ndarray
    boundary: np.ndarray  # the first row of an episode
    dropped: int


def planned(
    reader: Reader, terminated: str, truncated: str | None, has_next: bool, has_final: bool, resets: bool
) -> Plan:
    """What becomes of each row; `resets`: the row after an end holds the final observation and is no step itself."""
    there = reader.mask(0, reader.steps)
    over = reader.flag(terminated)
    cut = np.zeros_like(over)
    for name in set(reader.buffer.ends) - {terminated, truncated}:
        cut |= reader.flag(name) & ~over
    if truncated:
        cut |= reader.flag(truncated)
    end = over | cut
    after_end = _later(end)
    reset = np.zeros_like(end)
    if resets:
        for step, lane in np.argwhere(end):  # in order of time; an end of a reset row is none
            if not reset[step, lane] and step + 1 < len(end):
                reset[step + 1, lane] = True
        end &= ~reset
        after_end = _later(end)
        over, cut = over & end, cut & end
        # What came before the oldest row of a full lane is unknown: it may be a reset row.
        full = reader.sizes == reader.buffer.geometry.length
        unsure = np.zeros_like(end)
        unsure[:1] = full
    follows = np.zeros_like(there)
    follows[:-1] = there[1:]
    from_final = end & there if has_final and not resets else np.zeros_like(end)
    from_next = there & follows & (~end | resets) & ~from_final
    known = from_next | from_final | over | has_next
    if resets:
        known &= ~unsure
    dropped = there & ~known & ~reset
    keep = there & known & ~reset
    goes_on = np.zeros_like(keep)
    goes_on[:-1] = keep[1:]
    cut |= ~end & ~goes_on
    return Plan(keep, from_next, from_final, over, cut & keep, after_end, int(dropped.sum()))


def _later(flag: np.ndarray) -> np.ndarray:
    """The same, of the row before."""
    out = np.zeros_like(flag)
    out[1:] = flag[:-1]
    return out


def numbers(plan: Plan) -> Iterator[np.ndarray]:
    """Numbers of the episodes of the rows that are kept, lane after lane; those of later lanes are larger."""
    first = 0
    for lane in range(plan.keep.shape[1]):
        ids = first + np.cumsum(plan.boundary[:, lane], dtype=np.int64)
        first = int(ids.max(initial=first - 1)) + 1
        yield ids[plan.keep[:, lane]]
