"""Queue anchors in order of arrival, for `Consume(order="fifo")`: one queue of all lanes, and each lane's part of it.

Consumed anchors are the oldest of their lane. Rows may be overwritten up to the oldest anchor that waits, so the buffer refuses
new rows where it would lose one (`fbuf._buffer.state_ops.room`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fbuf._algorithms import slot_pool
from fbuf._core.component import state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.geometry import Geometry
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.ring import modulo, zeros
from fbuf._interfaces.sampler import Draw, EligibilityUpdate, EligibleSet
from fbuf.samplers._base import masked_draw


@state(name="fbuf.samplers.Fifo")
class FifoState:
    """Hold the anchors of each lane, and the queue of those that wait."""

    log: AnchorQueue
    held: jax.Array  # int32[E], anchors of each lane
    used: jax.Array  # int32[E], how many of these, the oldest, are consumed
    oldest: jax.Array  # int32[E], slot of the lane's oldest anchor that waits; undefined if none does
    slot: jax.Array  # int32[C], a ring of the slots that wait, in order of arrival
    first: jax.Array  # int32[], place of the oldest in the ring
    left: jax.Array | None  # int32[C] by slot, draws left; None if each is drawn once


def init(geometry: Geometry, dense: bool, times: int) -> FifoState:
    """Make an empty queue."""
    held, used, oldest, slot, left = zeros(*(geometry.lanes,) * 3, *(geometry.capacity,) * 2)
    first = jnp.zeros((), jnp.int32)
    return FifoState(anchor_log.init(geometry, dense), held, used, oldest, slot, first, None if times == 1 else left)


def number(queue: FifoState) -> jax.Array:
    """Return the anchors that wait, int32[]."""
    return jnp.sum(queue.held - queue.used, dtype=jnp.int32)


def change(queue: FifoState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array, times: int) -> FifoState:
    """Append the anchors that opened, in order of time, then of lane."""
    held, closed = anchor_log.close(queue.held, change, geometry)
    used, oldest = queue.used - closed, queue.oldest
    slot, mask = change.open_slot.reshape(-1), change.open_mask.reshape(-1)
    if mask.shape[0]:
        opened = jnp.take_along_axis(change.open_slot, jnp.argmax(change.open_mask, axis=0)[None], axis=0)[0]
        oldest = jnp.where(held > used, oldest, opened)
    place = queue.first + number(queue) + jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    left = queue.left
    return FifoState(
        log=anchor_log.apply(queue.log, change, geometry, token),
        held=held + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32),
        used=used,
        oldest=oldest,
        slot=slot_pool.put(queue.slot, modulo(place, geometry.capacity), slot, mask, token),
        first=queue.first,
        left=None if left is None else slot_pool.put(left, slot, jnp.full_like(slot, times), mask, token),
    )


def draw(
    queue: FifoState, batch_size: int, wanted: jax.Array, eligible: EligibleSet, token: jax.Array
) -> tuple[FifoState, Draw]:
    """Draw the oldest anchors. Those without draws left are consumed: always the first of the queue."""
    geometry, order = eligible.geometry, jnp.arange(batch_size, dtype=jnp.int32)
    waiting = number(queue)
    mask = order < jnp.minimum(waiting, wanted)
    slot = queue.slot.at[modulo(queue.first + order, geometry.capacity)].get(mode="promise_in_bounds")
    left = jnp.ones_like(slot) if queue.left is None else queue.left.at[slot].get(mode="promise_in_bounds")
    consumed = (mask & (left <= jnp.int32(1))).astype(jnp.int32)
    used = queue.used.at[slot % jnp.int32(geometry.lanes)].add(consumed)
    oldest = anchor_log.at(queue.log, eligible, jnp.arange(geometry.lanes, dtype=jnp.int32), used)
    token, (slot, left, oldest) = order_after_reads(token, (slot, left, oldest))
    after = dataclasses.replace(
        queue,
        used=used,
        oldest=oldest,
        first=modulo(queue.first + jnp.sum(consumed, dtype=jnp.int32), geometry.capacity),
        left=None if queue.left is None else slot_pool.put(queue.left, slot, left - jnp.int32(1), mask, token),
    )
    chance = jnp.float32(1) / jnp.maximum(waiting, jnp.int32(1)).astype(jnp.float32)
    return after, masked_draw(slot, chance, mask, geometry)


def waiting_slots(queue: FifoState, geometry: Geometry) -> jax.Array:
    """Return which slots wait, bool[C]. O(C)."""
    place = jnp.arange(geometry.capacity, dtype=jnp.int32)
    waits = modulo(place - queue.first, geometry.capacity) < number(queue)
    nowhere = jnp.int32(geometry.capacity) + place
    return jnp.zeros(place.shape, bool).at[jnp.where(waits, queue.slot, nowhere)].set(True, mode="drop")
