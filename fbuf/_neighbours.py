"""Which anchors lie before a row in its episode: what reaches from a surprise back to what led there.

Found from the flags of the rows (`fbuf._anchors`): a row that starts an episode has none before it, and none lies before the
oldest row held. Links from row to row were rejected: rows of a lane lie side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf import _anchors, _ring
from fbuf._anchors import Anchors
from fbuf._pin import pin
from fbuf._typing import Geometry, Ring


def before(
    anchors: Anchors, ring: Ring, geometry: Geometry, slot: jax.Array, reach: int, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Slots int32[B, W] of the W rows before each of `slot` int32[B], nearest first; and the token.

    C where there is none: beyond the episode's first row or the oldest held, where a row is no anchor, and for slot C.
    """
    capacity = jnp.int32(geometry.capacity)
    inside = slot < capacity
    here = jnp.where(inside, slot, jnp.int32(0))
    position, lane = _ring.lane_of(geometry, here)
    age = (position - ring.cursor[lane] + ring.size[lane]) % jnp.int32(geometry.length)
    back = jnp.arange(reach + 1, dtype=jnp.int32)[None, :]
    row = _ring.shift(geometry, here[:, None], -back)
    token, (flags,) = pin(token, (anchors.flags.at[row].get(mode="promise_in_bounds"),))
    began = jnp.cumsum(_anchors.has(flags, _anchors.START)[:, :-1], axis=1, dtype=jnp.int32) > jnp.int32(0)
    held = inside[:, None] & (back <= age[:, None])
    there = held[:, 1:] & ~began & _anchors.has(flags, _anchors.OPEN)[:, 1:]
    return jnp.where(there, row[:, 1:], capacity), token
