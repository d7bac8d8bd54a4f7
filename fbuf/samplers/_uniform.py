"""`Uniform`: every anchor alike, with replacement; O(1) a draw.

Where every row is an anchor nothing is stored. Otherwise a log of 4 bytes a row, kept as rows arrive (see
`fbuf._population`). Rejection from all rows was not taken: its time is unbounded, and a fixed number of tries is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf import _population
from fbuf._config import component, state
from fbuf._typing import Change, Draw, Geometry, Population


@state
class UniformState:
    """Logs of anchors, oldest first; empty where every row held is one."""

    log: jax.Array  # int32[C] (or [0]), slots; lane e owns places p * E + e
    head: jax.Array  # int32[E], place of the lane's oldest anchor
    count: jax.Array  # int32[E]


@component
class Uniform:
    """Draws every anchor with the same probability, with replacement.

    Cost: O(1) a draw and an anchor that opens or closes; 4 bytes a row where the view looks at neighbours, else none.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).sampler
      Uniform()
    """

    @property
    def numbers(self) -> tuple[str, ...]:
        return ()

    @property
    def options(self) -> tuple[str, ...]:
        return ()

    @property
    def prioritized(self) -> bool:
        return False

    def init(self, geometry: Geometry, dense: bool) -> UniformState:
        lanes = 0 if dense else geometry.lanes
        return UniformState(
            log=jnp.zeros((0 if dense else geometry.capacity,), jnp.int32),
            head=jnp.zeros((lanes,), jnp.int32),
            count=jnp.zeros((lanes,), jnp.int32),
        )

    def change(self, sampler: UniformState, change: Change, geometry: Geometry, token: jax.Array) -> UniformState:
        if sampler.head.shape[0] == 0:
            return sampler
        closed = jnp.sum(change.close_mask, axis=0, dtype=jnp.int32)
        head = (sampler.head + closed) % jnp.int32(geometry.length)
        count = sampler.count - closed
        log = _population.append(sampler.log, head + count, change.open_slot, change.open_mask, geometry, token)
        return UniformState(log, head, count + jnp.sum(change.open_mask, axis=0, dtype=jnp.int32))

    def draw(
        self,
        sampler: UniformState,
        key: jax.Array,
        batch_size: int,
        population: Population,
        options: Mapping[str, jax.Array],
    ) -> Draw:
        del options
        geometry = population.geometry
        total = jnp.sum(population.available, dtype=jnp.int32)
        nth = _population.below(key, (batch_size,), total)
        if sampler.head.shape[0] == 0:
            slot = _population.nth_held(population.ring, geometry, nth)
        else:
            slot = _population.nth_logged(sampler.log, sampler.head, sampler.count, geometry, nth)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        chance = jnp.float32(1) / jnp.maximum(total, jnp.int32(1)).astype(jnp.float32)
        return Draw(
            slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(
        self,
        sampler: UniformState,
        slot: jax.Array,
        error: jax.Array,
        geometry: Geometry,
        token: jax.Array,
    ) -> UniformState:
        return sampler

    def set(self, sampler: UniformState, **numbers: Any) -> UniformState:
        return sampler

    def clear(self, sampler: UniformState, geometry: Geometry, dense: bool) -> UniformState:
        return UniformState(sampler.log, jnp.zeros_like(sampler.head), jnp.zeros_like(sampler.count))

    def stats(self, sampler: UniformState) -> dict[str, jax.Array]:
        return {}
