"""Draw every anchor a limited number of times, for data that is used once or a few times.

A pool holds the anchors that may still be drawn (`fbuf._algorithms.slot_pool`). A batch is a random part of it, without
repeats. Anchors leave the pool after their last draw or when they close.

With order="fifo" a queue of all lanes in order of arrival replaces the pool, and each lane's part of it. Consumed anchors are
the oldest of their lane. Rows may be overwritten up to the oldest anchor that waits, so the buffer refuses new rows where it
would lose one (`fbuf._buffer.state.room_left`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf._algorithms import slot_pool
from fbuf._algorithms.slot_pool import SlotPool
from fbuf._core.component import component, state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import SlotRemap
from fbuf._core.slots import Geometry, Ranges, modulo, zeros
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected, Sampler
from fbuf.samplers._base import masked_draw


@state
class FifoState:
    """Hold the anchors of each lane, and the queue of those that wait."""

    log: AnchorQueue | None  # None if every row held is an anchor
    held: Array  # int32[E], anchors of each lane
    used: Array  # int32[E], how many of these, the oldest, are consumed
    oldest: Array  # int32[E], slot of the lane's oldest anchor that waits; undefined if none does
    slot: Array  # int32[C], a ring of the slots that wait, in order of arrival
    first: Array  # int32[], place of the oldest in the ring
    left: Array | None  # int32[C] by slot, draws left; None if each is drawn once

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "held", self.held, 0, geometry.length
        yield "used", self.used, 0, self.held
        waits = np.asarray(self.used) < np.asarray(self.held)
        yield "oldest", np.where(waits, self.oldest, 0), 0, geometry.capacity - 1
        yield "slot", self.slot, 0, geometry.capacity - 1
        yield "first", self.first, 0, geometry.capacity - 1
        if self.left is not None:
            yield "left", self.left, 0, 2**31 - 1


def init_queue(geometry: Geometry, dense: bool, times: int) -> FifoState:
    """Make an empty queue."""
    counts, used, oldest, slot, left = zeros(*(geometry.lanes,) * 3, *(geometry.capacity,) * 2)
    first = jnp.zeros((), jnp.int32)
    return FifoState(anchor_log.init(geometry, dense), counts, used, oldest, slot, first, None if times == 1 else left)


def number_waiting(queue: FifoState) -> Array:
    """Return the anchors that wait, int32[]."""
    return jnp.sum(queue.held - queue.used, dtype=jnp.int32)


def change_queue(queue: FifoState, change: AnchorChange, geometry: Geometry, token: Array, times: int) -> FifoState:
    """Append the anchors that opened, in order of time, then of lane."""
    counts, closed = anchor_log.close(queue.held, change, geometry)
    used, oldest = queue.used - closed, queue.oldest
    slot, mask = change.open_slot.reshape(-1), change.open_mask.reshape(-1)
    if mask.shape[0]:
        opened = jnp.take_along_axis(change.open_slot, jnp.argmax(change.open_mask, axis=0)[None], axis=0)[0]
        oldest = jnp.where(counts > used, oldest, opened)
    place = queue.first + number_waiting(queue) + jnp.cumsum(mask, dtype=jnp.int32) - jnp.int32(1)
    left = queue.left
    return FifoState(
        log=anchor_log.apply(queue.log, change, geometry, token),
        held=counts + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32),
        used=used,
        oldest=oldest,
        slot=slot_pool.put(queue.slot, modulo(place, geometry.capacity), slot, mask, token),
        first=queue.first,
        left=None if left is None else slot_pool.put(left, slot, jnp.full_like(slot, times), mask, token),
    )


def draw_queue(
    queue: FifoState, batch_size: int, wanted: Array, anchors: AnchorSet, token: Array
) -> tuple[FifoState, Draw]:
    """Draw the oldest anchors. Those without draws left are consumed: always the first of the queue."""
    geometry, order = anchors.geometry, jnp.arange(batch_size, dtype=jnp.int32)
    waiting = number_waiting(queue)
    mask = order < jnp.minimum(waiting, wanted)
    slot = queue.slot.at[modulo(queue.first + order, geometry.capacity)].get(mode="promise_in_bounds")
    left = jnp.ones_like(slot) if queue.left is None else queue.left.at[slot].get(mode="promise_in_bounds")
    consumed = (mask & (left <= jnp.int32(1))).astype(jnp.int32)
    used = queue.used.at[slot % jnp.int32(geometry.lanes)].add(consumed)
    oldest = anchor_log.at(queue.log, anchors, jnp.arange(geometry.lanes, dtype=jnp.int32), used)
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


def waiting_slots(queue: FifoState, geometry: Geometry) -> Array:
    """Return which slots wait, bool[C]. O(C)."""
    place = jnp.arange(geometry.capacity, dtype=jnp.int32)
    waits = modulo(place - queue.first, geometry.capacity) < number_waiting(queue)
    nowhere = jnp.int32(geometry.capacity) + place
    return jnp.zeros(place.shape, bool).at[jnp.where(waits, queue.slot, nowhere)].set(True, mode="drop")


@state
class ConsumeState:
    """Hold the anchors that may still be drawn, and how often."""

    pool: SlotPool  # the anchors that may still be drawn
    left: Array | None  # int32[C] by slot, draws left; None if `times` is 1

    def ranges(self, geometry: Geometry) -> Ranges:
        if self.left is not None:
            yield "left", self.left, 0, 2**31 - 1


@component
class Consume(Sampler):
    """Draw every anchor at most `times` times, and at most once in a batch.

    Attributes:
      times: Draws of an anchor, >= 1.
      order: "random": uniformly among the anchors left; new rows overwrite the oldest, drawn or not. "fifo": in order of
        arrival (of one call: by time, then by lane), for IMPALA and PPO; no row is overwritten before its anchors have been
        drawn `times` times. A full buffer refuses new rows: `Buffer.can_add` tells, and `stats` counts them in
        `refused_rows`. Where rows were refused, the episode is cut (`Buffer.cut`). `Replay` waits instead.

    If fewer than B anchors are left, the batch is short: `mask` is False at its end. `can_sample` returns whether any is
    left. `probability` is 1 / n for n anchors left before the draw; `weight` is 1. Drawing an expired or
    dropped row also uses a draw. `peek` consumes nothing.

    With "fifo" consumed rows stay readable, and their indices valid, until they are overwritten. The newest rows of a running
    episode also stay, until no later window needs them. Masked rows do not affect the order of windows that one call
    completes. With `prefetch=1` the batch drawn ahead may be short.

    `stats`: `anchors_left`, the anchors that may still be drawn.

    Cost: O(B) a draw, with a shuffle of up to 1024 anchors; O(1) for each row that becomes or stops being an anchor. 8 bytes a
    row, 12 if `times` > 1. "fifo" needs no shuffle, and 4 bytes a row, 8 with a view that reads neighbours; 4 more if
    `times` > 1.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Consume())
      >>> state = buffer.extend(buffer.init(jnp.float32(0)), jnp.arange(5.0))
      >>> state, batch = buffer.sample(state, jax.random.key(0), 8)
      >>> sorted(batch.data[batch.mask].tolist()), bool(buffer.can_sample(state))
      ([0.0, 1.0, 2.0, 3.0, 4.0], False)

      A queue of trajectories of 2 rows in each of 3 lanes:

      >>> view = fbuf.views.Sequence(2, stride=2, episode_end=())
      >>> buffer = fbuf.Buffer(12, lanes=3, view=view, sampler=fbuf.samplers.Consume(order="fifo"))
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(12).reshape(4, 3)})
      >>> bool(buffer.can_add(state, 2))
      False
      >>> state, batch = buffer.sample(state, jax.random.key(0), 3)
      >>> batch.data["t"].tolist(), bool(buffer.can_add(state, 2))
      ([[0, 3], [1, 4], [2, 5]], True)
    """

    times: int = 1
    order: Literal["random", "fifo"] = "random"

    covers = True
    since = "since they were added"

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or isinstance(self.times, bool) or not 1 <= self.times < 2**31:
            raise ValueError(f"Consume: times is {self.times!r}; expected an int >= 1.")

    @property
    def in_order(self) -> bool:
        return self.order == "fifo"

    @property
    def moves(self) -> bool:
        return self.order == "random"

    @property
    def whole(self) -> str:
        return "is one queue of all rows; expected order='random'" if self.order == "fifo" else ""

    def init(self, geometry: Geometry, dense: bool) -> ConsumeState | FifoState:
        if self.order == "fifo":
            return init_queue(geometry, dense, self.times)
        left = None if self.times == 1 else jnp.zeros((geometry.capacity,), jnp.int32)
        return ConsumeState(pool=slot_pool.init(geometry.capacity), left=left)

    def change(
        self, sampler: ConsumeState | FifoState, change: AnchorChange, geometry: Geometry, token: Array
    ) -> ConsumeState | FifoState:
        if isinstance(sampler, FifoState):
            return change_queue(sampler, change, geometry, token, self.times)
        nowhere = jnp.int32(geometry.capacity)
        pool = sampler.pool
        if change.close_slot.size:
            closed = jnp.where(change.close_mask, change.close_slot, nowhere).reshape(-1)
            place, token = slot_pool.places(pool, closed, token)
            pool = slot_pool.remove(pool, place, place >= jnp.int32(0), token)
        opened = jnp.where(change.open_mask, change.open_slot, nowhere).reshape(-1)
        # Where every row is an anchor, a new row may replace one that is still in the pool.
        mask = change.open_mask.reshape(-1)
        place, token = slot_pool.places(pool, opened, token)
        pool = slot_pool.add(pool, opened, mask & (place < jnp.int32(0)), token)
        left = self._set_left(sampler.left, opened, mask, jnp.full_like(opened, self.times), token)
        return ConsumeState(pool, left)

    def draw_some(
        self,
        sampler: ConsumeState | FifoState,
        key: Array,
        batch_size: int,
        wanted: Array,
        anchors: AnchorSet,
        options: Leaves,
        token: Array,
    ) -> tuple[ConsumeState | FifoState, Draw]:
        if isinstance(sampler, FifoState):
            return draw_queue(sampler, batch_size, wanted, anchors, token)
        pool = sampler.pool
        mask = jnp.arange(batch_size, dtype=jnp.int32) < jnp.minimum(pool.number, wanted)
        place = jnp.where(mask, slot_pool.draw(pool, key, batch_size), jnp.int32(0))
        slot = pool.slot.at[place].get(mode="promise_in_bounds")
        left = jnp.ones_like(slot) if sampler.left is None else sampler.left.at[slot].get(mode="promise_in_bounds")
        token, (place, slot, left) = order_after_reads(token, (place, slot, left))
        after = ConsumeState(
            pool=slot_pool.remove(pool, place, mask & (left <= jnp.int32(1)), token),
            left=self._set_left(sampler.left, slot, mask, left - jnp.int32(1), token),
        )
        chance = jnp.float32(1) / jnp.maximum(pool.number, jnp.int32(1)).astype(jnp.float32)
        return after, masked_draw(slot, chance, mask, anchors.geometry)

    def _set_left(self, left: Array | None, slot: Array, mask: Array, value: Array, token: Array) -> Array | None:
        return None if left is None else slot_pool.put(left, slot, value, mask, token)

    def available(self, sampler: ConsumeState | FifoState, count: Array | None = None) -> Array:
        return number_waiting(sampler) if isinstance(sampler, FifoState) else sampler.pool.number

    def waiting(self, sampler: ConsumeState | FifoState) -> tuple[Array, Array] | None:
        return (sampler.held - sampler.used, sampler.oldest) if isinstance(sampler, FifoState) else None

    def inspect(self, sampler: ConsumeState | FifoState, anchors: AnchorSet) -> Inspected:
        if isinstance(sampler, FifoState):
            listed = waiting_slots(sampler, anchors.geometry)
        else:
            listed = sampler.pool.place >= jnp.int32(0)
        number = jnp.maximum(self.available(sampler), jnp.int32(1)).astype(jnp.float32)
        left = listed.astype(jnp.int32) if sampler.left is None else jnp.where(listed, sampler.left, jnp.int32(0))
        chance = listed.astype(jnp.float32) / number
        return Inspected(chance, draws=jnp.int32(self.times) - left)

    def row_by_row(self, dense: bool) -> bool:
        # Where an anchor closes, the last of the pool takes its place.
        return dense and not self.in_order

    def moved(self, sampler: ConsumeState, remap: SlotRemap) -> ConsumeState:
        left = None if sampler.left is None else jnp.asarray(remap.by_slot(sampler.left, 0))
        return ConsumeState(slot_pool.moved(sampler.pool, remap), left)

    def stats(self, sampler: ConsumeState | FifoState) -> dict[str, Array]:
        return {"anchors_left": self.available(sampler)}
