"""A list of slots in no order, from which any can be struck out and a random part drawn, all at once: O(B), not O(C).

Slots lie side by side in the first places; who is struck out is replaced by one of the last. Which of the last go where is
worked out by counting, so that nothing is done one after another.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import permutation
from fbuf._core.component import state
from fbuf._core.ordering import order_after_reads


@state
class Roster:
    """Slots on the list."""

    slot: jax.Array  # int32[C], by place; what lies beyond `number` means nothing
    place: jax.Array  # int32[C], by slot; -1 where it is not on the list
    number: jax.Array  # int32[], slots on the list


def init(capacity: int) -> Roster:
    """Nobody."""
    return Roster(
        slot=jnp.zeros((capacity,), jnp.int32),
        place=jnp.full((capacity,), -1, jnp.int32),
        number=jnp.zeros((), jnp.int32),
    )


def places(roster: Roster, slot: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int32[A], -1 for slots that are not on the list or out of range; and the token."""
    token, place = order_after_reads(token, roster.place.at[slot].get(mode="fill", fill_value=-1))
    return place, token


def add(roster: Roster, slot: jax.Array, mask: jax.Array, token: jax.Array) -> Roster:
    """Puts slots int32[A] where `mask` on the list; none is there, none comes twice."""
    capacity = roster.slot.shape[0]
    rank = jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    place = roster.number + rank
    return Roster(
        slot=put(roster.slot, place, slot, mask, token),
        place=put(roster.place, slot, place, mask, token),
        number=jnp.minimum(roster.number + jnp.sum(mask, dtype=jnp.int32), jnp.int32(capacity)),
    )


def strike(roster: Roster, place: jax.Array, mask: jax.Array, token: jax.Array) -> Roster:
    """Strikes out those in places int32[A] where `mask`; no place twice."""
    size, capacity = place.shape[0], roster.slot.shape[0]
    left = roster.number - jnp.sum(mask, dtype=jnp.int32)
    ahead = jnp.arange(size, dtype=jnp.int32)
    # Of the last places, which are given up, those that are not struck out move into the holes before them.
    tail = left + ahead
    inside = tail < roster.number
    struck = jnp.zeros((size,), bool)
    struck = struck.at[jnp.where(mask & (place >= left), place - left, jnp.int32(size) + ahead)].set(
        True, mode="drop", unique_indices=True
    )
    mover, hole = inside & ~struck, mask & (place < left)
    gone = roster.slot.at[jnp.clip(place, 0, capacity - 1)].get(mode="promise_in_bounds")
    moved = roster.slot.at[jnp.minimum(tail, jnp.int32(capacity - 1))].get(mode="promise_in_bounds")
    token, (gone, moved) = order_after_reads(token, (gone, moved))
    holes = _compact(place, hole, size)
    moved = _compact(moved, mover, size)
    moves = ahead < jnp.sum(hole, dtype=jnp.int32)
    slots = jnp.concatenate([gone, moved])
    at = jnp.concatenate([jnp.full((size,), -1, jnp.int32), holes])
    return Roster(
        slot=put(roster.slot, holes, moved, moves, token),
        place=put(roster.place, slots, at, jnp.concatenate([mask, moves]), token),
        number=left,
    )


def draw(roster: Roster, key: jax.Array, batch_size: int) -> jax.Array:
    """int32[B], different places, in random order; of those beyond `number` places there is nothing to be had."""
    few = min(permutation.SHUFFLED, roster.slot.shape[0])
    bits = jax.random.bits(key, (2 + few,), jnp.uint32)

    def shuffled(number: jax.Array) -> jax.Array:
        order = permutation.shuffled(bits[2:], number)[:batch_size]
        return jnp.concatenate([order, jnp.zeros((batch_size - order.shape[0],), jnp.int32)])

    def permuted(number: jax.Array) -> jax.Array:
        return permutation.permute(bits[:2], jnp.arange(batch_size, dtype=jnp.int32), number)

    if roster.slot.shape[0] <= permutation.SHUFFLED:
        return shuffled(roster.number)
    return lax.cond(roster.number <= jnp.int32(permutation.SHUFFLED), shuffled, permuted, roster.number)


def _compact(values: jax.Array, mask: jax.Array, size: int) -> jax.Array:
    """int32[size], those where `mask` first, in order."""
    rank = jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    at = jnp.where(mask, rank, jnp.int32(size) + jnp.arange(size, dtype=jnp.int32))
    return jnp.zeros((size,), jnp.int32).at[at].set(values, mode="drop", unique_indices=True)


def put(array: jax.Array, at: jax.Array, values: jax.Array, mask: jax.Array, token: jax.Array) -> jax.Array:
    """Writes int32[A] where `mask`; no place twice."""
    nowhere = jnp.int32(array.shape[0]) + jnp.arange(at.shape[0], dtype=jnp.int32)
    return array.at[jnp.where(mask, at, nowhere) + token].set(values, mode="drop", unique_indices=True)
