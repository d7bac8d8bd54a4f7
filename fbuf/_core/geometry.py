"""How slots are laid out in lanes, and where each lane writes next.

A *slot* holds one row, int32 in [0, C). With E lanes (parallel environments) each lane owns a ring of L = C / E rows; row
`position` of lane `e` is in slot `position * E + e`. `C` stands for "no slot": reads there give zeros, writes are dropped.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax

from fbuf._core.component import state

S = TypeVar("S")


class Geometry(NamedTuple):
    """How slots are laid out. Static."""

    lanes: int  # E, parallel environments; 1 without lanes
    length: int  # L, rows a lane holds
    streams: bool = True  # rows replace the oldest of their lane; else any, and a lane is but a column of slots

    @property
    def capacity(self) -> int:
        """C, all slots."""
        return self.lanes * self.length


@state
class Ring:
    """Where each lane writes next. Counters of rows are kept as (cursor, lap), so nothing overflows after 2^32 rows."""

    cursor: jax.Array  # int32[E], position of the next row, in [0, L)
    size: jax.Array  # int32[E], rows held, in [0, L]
    # uint32[E], how often the lane came round (and was cleared), from 1; wraps, compared for equality only
    lap: jax.Array


class Placement(NamedTuple):
    """Where one write goes."""

    slot: jax.Array  # int32[N, E]; out of range and all different where nothing is written
    rank: jax.Array  # int32[N, E], place among the lane's rows of this write
    rows: jax.Array  # int32[E], rows of this write per lane
    ring: Ring  # the rings afterwards
