"""The layout of slots in lanes, and the position where each lane writes next.

A *slot*, int32 in [0, C), holds one row. Each of E lanes (parallel environments) has a ring of L = C / E rows; row `position`
of lane `e` is in slot `position * E + e`. Slot C means "no slot": reads return zeros, and writes are dropped.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax

from fbuf._core.component import state

S = TypeVar("S")


class Geometry(NamedTuple):
    """The layout of slots. Static."""

    lanes: int  # E, parallel environments; 1 without lanes
    length: int  # L, rows a lane holds
    streams: bool = True  # whether rows replace the oldest of their lane; otherwise any row of any lane

    @property
    def capacity(self) -> int:
        """C, all slots."""
        return self.lanes * self.length


@state
class Ring:
    """The position where each lane writes next. Rows are counted as (cursor, lap), which never overflows."""

    cursor: jax.Array  # int32[E], position of the next row, in [0, L)
    size: jax.Array  # int32[E], rows held, in [0, L]
    # uint32[E], rounds (and clears) of the lane, from 1; wraps around, and is compared for equality only
    lap: jax.Array


class Placement(NamedTuple):
    """The slots of one write."""

    slot: jax.Array  # int32[N, E]; distinct and out of range where nothing is written
    rank: jax.Array  # int32[N, E], number of the row among those of the lane in this write
    rows: jax.Array  # int32[E], rows of this write per lane
    ring: Ring  # the rings afterwards
