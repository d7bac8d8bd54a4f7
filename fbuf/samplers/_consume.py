"""`Consume`: every anchor is drawn so many times and no more; for data that is to be used once, or a few times.

The anchors that may still be drawn are on a list (`fbuf._algorithms.slot_pool`). A batch is a random part of it, all
different; who has been drawn often enough is struck out, and so is who closes. Counting draws and rejecting those that had
their share was not taken: as the buffer is used up it takes ever longer, or is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._algorithms import slot_pool
from fbuf._algorithms.slot_pool import Roster
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.ordering import order_after_reads
from fbuf._interfaces.sampler import NO_NUMBERS, Draw, EligibilityUpdate, EligibleSet, Inspected


@state
class ConsumeState:
    """Who may still be drawn, and how often."""

    roster: Roster
    left: jax.Array  # int32[C] by slot; [0] where once is enough


@component
class Consume:
    """Draws every anchor at most `times` times, and in one batch at most once: any part of those left is as likely as another.

    Attributes:
      times: Draws of an anchor, >= 1.

    Where fewer than B anchors are left the batch is short: `mask` False at its end. `can_sample` says whether any is.
    `probability` is 1 / n, n the anchors left before the draw; `weight` is 1. A draw counts also where the row turns out to
    have expired, or to have found no room. `peek` uses nothing up.

    `stats`: `anchors_left`, how many may still be drawn.

    Cost: O(B) a draw, up to 1024 shuffled; O(1) an anchor that opens or closes. 8 bytes a row, 12 if `times` is not 1.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Consume())
      >>> state = buffer.extend(buffer.init(jnp.float32(0)), jnp.arange(5.0))
      >>> state, batch = buffer.sample(state, jax.random.key(0), 8)
      >>> sorted(batch.data[batch.mask].tolist()), bool(buffer.can_sample(state))
      ([0.0, 1.0, 2.0, 3.0, 4.0], False)
    """

    times: int = 1

    numbers = NO_NUMBERS
    options = NO_NUMBERS
    prioritized = False
    by_episode = False
    stamp = None
    since = "since they came"

    def __post_init__(self) -> None:
        if not isinstance(self.times, int) or isinstance(self.times, bool) or not 1 <= self.times < 2**31:
            raise ValueError(f"Consume: times is {self.times!r}; expected an int >= 1.")

    def init(self, geometry: Geometry, dense: bool) -> ConsumeState:
        size = 0 if self.times == 1 else geometry.capacity
        return ConsumeState(roster=slot_pool.init(geometry.capacity), left=jnp.zeros((size,), jnp.int32))

    def change(
        self, sampler: ConsumeState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> ConsumeState:
        nowhere = jnp.int32(geometry.capacity)
        roster = sampler.roster
        if change.close_slot.size:
            closed = jnp.where(change.close_mask, change.close_slot, nowhere).reshape(-1)
            place, token = slot_pool.places(roster, closed, token)
            roster = slot_pool.remove(roster, place, place >= jnp.int32(0), token)
        opened = jnp.where(change.open_mask, change.open_slot, nowhere).reshape(-1)
        # Where every row is an anchor, a new row may take the place of one that is still on the list.
        mask = change.open_mask.reshape(-1)
        place, token = slot_pool.places(roster, opened, token)
        roster = slot_pool.add(roster, opened, mask & (place < jnp.int32(0)), token)
        return ConsumeState(
            roster, self._set_left(sampler.left, opened, mask, jnp.full_like(opened, self.times), token)
        )

    def draw(
        self,
        sampler: ConsumeState,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[ConsumeState, Draw]:
        return self.draw_some(sampler, key, batch_size, jnp.int32(batch_size), eligible, options, token)

    def draw_some(
        self,
        sampler: ConsumeState,
        key: jax.Array,
        batch_size: int,
        wanted: jax.Array,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[ConsumeState, Draw]:
        del options
        roster, capacity = sampler.roster, jnp.int32(eligible.geometry.capacity)
        mask = jnp.arange(batch_size, dtype=jnp.int32) < jnp.minimum(roster.number, wanted)
        place = jnp.where(mask, slot_pool.draw(roster, key, batch_size), jnp.int32(0))
        slot = roster.slot.at[place].get(mode="promise_in_bounds")
        left = jnp.ones_like(slot) if self.times == 1 else sampler.left.at[slot].get(mode="promise_in_bounds")
        token, (place, slot, left) = order_after_reads(token, (place, slot, left))
        after = ConsumeState(
            roster=slot_pool.remove(roster, place, mask & (left <= jnp.int32(1)), token),
            left=self._set_left(sampler.left, slot, mask, left - jnp.int32(1), token),
        )
        chance = jnp.float32(1) / jnp.maximum(roster.number, jnp.int32(1)).astype(jnp.float32)
        return after, Draw(
            slot=jnp.where(mask, slot, capacity),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def _set_left(
        self, left: jax.Array, slot: jax.Array, mask: jax.Array, value: jax.Array, token: jax.Array
    ) -> jax.Array:
        return left if self.times == 1 else slot_pool.put(left, slot, value, mask, token)

    def update(
        self, sampler: ConsumeState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
    ) -> ConsumeState:
        return sampler

    def set(self, sampler: ConsumeState, **numbers: Any) -> ConsumeState:
        return sampler

    def clear(self, sampler: ConsumeState, geometry: Geometry, dense: bool) -> ConsumeState:
        return self.init(geometry, dense)

    def available(self, sampler: ConsumeState, count: jax.Array) -> jax.Array:
        return sampler.roster.number

    def inspect(self, sampler: ConsumeState, eligible: EligibleSet, fetched: None) -> Inspected:
        listed = sampler.roster.place >= jnp.int32(0)
        number = jnp.maximum(sampler.roster.number, jnp.int32(1)).astype(jnp.float32)
        left = listed.astype(jnp.int32) if self.times == 1 else jnp.where(listed, sampler.left, jnp.int32(0))
        chance = listed.astype(jnp.float32) / number
        return Inspected(chance, draws=jnp.int32(self.times) - left)

    def stats(self, sampler: ConsumeState) -> dict[str, jax.Array]:
        return {"anchors_left": sampler.roster.number}
