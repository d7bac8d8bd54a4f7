"""Keep an unordered pool of slots with batched removal and random draws: O(B), not O(C).

Slots fill the first places. A removed slot is replaced by one of the last; prefix sums pair holes with last slots in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import random
from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ranges, where_written


@state
class SlotPool:
    """Hold the slots of the pool."""

    slot: jax.Array  # int32[C], by place; undefined beyond `number`
    place: jax.Array  # int32[C], by slot; -1 outside the pool
    number: jax.Array  # int32[], slots of the pool

    def ranges(self, geometry: Geometry) -> Ranges:
        capacity = geometry.capacity
        yield "number", self.number, 0, capacity
        yield "slot", self.slot, 0, capacity - 1
        place, number = np.full(capacity, -1), int(self.number)
        place[np.asarray(self.slot)[:number]] = np.arange(number)
        yield "place", self.place, place, place


def init(capacity: int) -> SlotPool:
    """Make an empty pool."""
    return SlotPool(
        slot=jnp.zeros((capacity,), jnp.int32),
        place=jnp.full((capacity,), -1, jnp.int32),
        number=jnp.zeros((), jnp.int32),
    )


def moved(pool: SlotPool, remap: SlotRemap) -> SlotPool:
    """Return the pool of rows that moved to other slots. Eager."""
    number, at = int(pool.number), remap.slot_table()
    slot = np.zeros(remap.after.capacity, np.int32)
    slot[:number] = at[np.asarray(pool.slot)[:number]]
    return SlotPool(jnp.asarray(slot), jnp.asarray(remap.by_slot(pool.place, -1)), pool.number)


def joined(parts: Sequence[SlotPool], join: SlotJoin) -> SlotPool:
    """Return the pool of a shard that takes rows of others. Eager."""
    listed = np.concatenate(join.names([part.slot[: int(part.number)] for part in parts]))
    kept = join.place[listed]
    kept = kept[kept >= 0].astype(np.int32)
    slot, place = np.zeros(join.after.capacity, np.int32), np.full(join.after.capacity, -1, np.int32)
    slot[: kept.size], place[kept] = kept, np.arange(kept.size)
    return SlotPool(jnp.asarray(slot), jnp.asarray(place), jnp.int32(kept.size))


def places(pool: SlotPool, slot: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the places int32[A] of slots, -1 for slots outside the pool or out of range; and the token."""
    token, place = order_after_reads(token, pool.place.at[slot].get(mode="fill", fill_value=-1))
    return place, token


def add(pool: SlotPool, slot: jax.Array, mask: jax.Array, token: jax.Array) -> SlotPool:
    """Add the slots int32[A] where `mask`. They must be distinct and not in the pool."""
    capacity = pool.slot.shape[0]
    rank = jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    place = pool.number + rank
    return SlotPool(
        slot=put(pool.slot, place, slot, mask, token),
        place=put(pool.place, slot, place, mask, token),
        number=jnp.minimum(pool.number + jnp.sum(mask, dtype=jnp.int32), jnp.int32(capacity)),
    )


def remove(pool: SlotPool, place: jax.Array, mask: jax.Array, token: jax.Array) -> SlotPool:
    """Remove the slots in places int32[A] where `mask`. The places must be distinct."""
    size, capacity = place.shape[0], pool.slot.shape[0]
    left = pool.number - jnp.sum(mask, dtype=jnp.int32)
    ahead = jnp.arange(size, dtype=jnp.int32)
    # The pool shrinks by its last places; slots kept there move into the holes before them.
    tail = left + ahead
    inside = tail < pool.number
    at = where_written(mask & (place >= left), place - left, size)
    removed = jnp.zeros((size,), bool).at[at].set(True, mode="drop", unique_indices=True)
    mover, hole = inside & ~removed, mask & (place < left)
    removed_slot = pool.slot.at[jnp.clip(place, 0, capacity - 1)].get(mode="promise_in_bounds")
    moved = pool.slot.at[jnp.minimum(tail, jnp.int32(capacity - 1))].get(mode="promise_in_bounds")
    token, (removed_slot, moved) = order_after_reads(token, (removed_slot, moved))
    holes = _compact(place, hole, size)
    moved = _compact(moved, mover, size)
    moves = ahead < jnp.sum(hole, dtype=jnp.int32)
    slots = jnp.concatenate([removed_slot, moved])
    at = jnp.concatenate([jnp.full((size,), -1, jnp.int32), holes])
    return SlotPool(
        slot=put(pool.slot, holes, moved, moves, token),
        place=put(pool.place, slots, at, jnp.concatenate([mask, moves]), token),
        number=left,
    )


def draw(pool: SlotPool, key: jax.Array, batch_size: int) -> jax.Array:
    """Draw distinct places int32[B] in random order; only the first `number` are meaningful."""
    few = min(random.SHUFFLED, pool.slot.shape[0])
    bits = jax.random.bits(key, (2 + few,), jnp.uint32)

    def shuffled(number: jax.Array) -> jax.Array:
        order = random.shuffled(bits[2:], number)[:batch_size]
        return jnp.concatenate([order, jnp.zeros((batch_size - order.shape[0],), jnp.int32)])

    def permuted(number: jax.Array) -> jax.Array:
        return random.permute(bits[:2], jnp.arange(batch_size, dtype=jnp.int32), number)

    if pool.slot.shape[0] <= random.SHUFFLED:
        return shuffled(pool.number)
    return control_flow.cond(pool.number <= jnp.int32(random.SHUFFLED), shuffled, permuted, pool.number)


def _compact(values: jax.Array, mask: jax.Array, size: int) -> jax.Array:
    """Move the values where `mask` to the front, in order, int32[size]."""
    rank = jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    at = where_written(mask, rank, size)
    return jnp.zeros((size,), jnp.int32).at[at].set(values, mode="drop", unique_indices=True)


def put(array: jax.Array, at: jax.Array, values: jax.Array, mask: jax.Array, token: jax.Array) -> jax.Array:
    """Write values int32[A] at distinct indices where `mask`."""
    at = where_written(mask, at, array.shape[0]) + token
    return array.at[at].set(values, mode="drop", unique_indices=True)
