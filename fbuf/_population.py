"""The anchors of all lanes in order, for samplers: the n-th of them in O(1), and an exact choice of n.

Where every row held is an anchor, the n-th is found by arithmetic. Otherwise each lane keeps a log of its anchors in
order of arrival: anchors open and close in that order, so the log is a queue.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fbuf import _ring
from fbuf._config import state
from fbuf._typing import Change, Geometry, Ring


@state
class Log:
    """Each lane's anchors, oldest first; empty where every row held is one."""

    slot: jax.Array  # int32[C] (or [0]); lane e owns places p * E + e
    head: jax.Array  # int32[E] (or [0]), place of the lane's oldest anchor
    count: jax.Array  # int32[E] (or [0])

    @property
    def dense(self) -> bool:
        """Whether every row held is an anchor, and nothing is stored."""
        return self.head.shape[0] == 0


def init(geometry: Geometry, dense: bool) -> Log:
    """No anchors."""
    lanes = 0 if dense else geometry.lanes
    return Log(
        slot=jnp.zeros((0 if dense else geometry.capacity,), jnp.int32),
        head=jnp.zeros((lanes,), jnp.int32),
        count=jnp.zeros((lanes,), jnp.int32),
    )


def follow(log: Log, change: Change, geometry: Geometry, token: jax.Array) -> Log:
    """After a write."""
    if log.dense:
        return log
    head = (log.head + jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)) % jnp.int32(geometry.length)
    count = log.count - jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
    slot = _append(log.slot, head + count, change.open_slot, change.open_mask, geometry, token)
    return Log(slot, head, count + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32))


def clear(log: Log) -> Log:
    """No anchors any more."""
    return Log(log.slot, jnp.zeros_like(log.head), jnp.zeros_like(log.count))


def nth(log: Log, ring: Ring, geometry: Geometry, nth: jax.Array) -> jax.Array:
    """Slots of the `nth` int32[B] anchors of all: lanes one after another, a lane's oldest first."""
    if log.dense:
        return nth_held(ring, geometry, nth)
    lane, rank = lane_and_rank(log.count, nth)
    return at(log, geometry, lane, rank)


def at(log: Log, geometry: Geometry, lane: jax.Array, rank: jax.Array) -> jax.Array:
    """Slots of anchors by lane and rank in it, 0 the oldest; of a log that is not empty by design."""
    place = (log.head[lane] + rank) % jnp.int32(geometry.length)
    return log.slot.at[place * jnp.int32(geometry.lanes) + lane].get(mode="promise_in_bounds")


def below(key: jax.Array, shape: tuple[int, ...], bound: jax.Array) -> jax.Array:
    """int32 uniform in [0, bound), from 64 random bits each; 0 where bound is 0.

    The high word of a 64 by 32 bit product: a bias below 2^-32, and cheaper than `jax.random.randint`.
    """
    bits = jax.random.bits(key, (2, *shape), jnp.uint32)
    n = bound.astype(jnp.uint32)
    carry_in = _multiply_high(bits[1], n)
    low = bits[0] * n
    total = low + carry_in
    return (_multiply_high(bits[0], n) + (total < low).astype(jnp.uint32)).astype(jnp.int32)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """The high 32 bits of a product of uint32s."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & mask, b >> half, b & mask
    middle = a1 * b0 + (a0 * b0 >> half)
    return a1 * b1 + (middle >> half) + ((middle & mask) + a0 * b1 >> half)


def lane_and_rank(count: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lane of the `nth` anchor of all, and its place among the lane's; lanes one after another."""
    if count.shape[0] == 1:
        return jnp.zeros_like(nth), nth
    end = jnp.cumsum(count, dtype=jnp.int32)
    lane = jnp.searchsorted(end, nth, side="right").astype(jnp.int32)
    lane = jnp.minimum(lane, jnp.int32(count.shape[0] - 1))
    return lane, nth - (end[lane] - count[lane])


def nth_held(ring: Ring, geometry: Geometry, nth: jax.Array) -> jax.Array:
    """Slot of the `nth` row of all held."""
    lane, rank = lane_and_rank(ring.size, nth)
    position = (ring.cursor[lane] - ring.size[lane] + rank) % jnp.int32(geometry.length)
    return position * jnp.int32(geometry.lanes) + lane


def _append(
    log: jax.Array,
    end: jax.Array,
    slot: jax.Array,
    mask: jax.Array,
    geometry: Geometry,
    token: jax.Array,
) -> jax.Array:
    """Writes slots int32[A, E] where `mask` to each lane's log, from place `end` int32[E] on."""
    rank = jnp.cumsum(mask, axis=0, dtype=jnp.int32) - jnp.int32(1)
    place = _ring.slot_at(geometry, (end[None, :] + rank) % jnp.int32(geometry.length))
    nowhere = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape) + jnp.int32(geometry.capacity)
    at = jnp.where(mask, place, nowhere).reshape(-1) + token
    return log.at[at].set(slot.reshape(-1), mode="drop", unique_indices=True)
