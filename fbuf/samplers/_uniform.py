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
from fbuf._config import component
from fbuf._population import Log
from fbuf._typing import Change, Draw, Geometry, Population


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

    def init(self, geometry: Geometry, dense: bool) -> Log:
        return _population.init(geometry, dense)

    def change(self, sampler: Log, change: Change, geometry: Geometry, token: jax.Array) -> Log:
        return _population.follow(sampler, change, geometry, token)

    def draw(
        self,
        sampler: Log,
        key: jax.Array,
        batch_size: int,
        population: Population,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Log, Draw]:
        del options, token
        geometry = population.geometry
        total = jnp.sum(population.available, dtype=jnp.int32)
        nth = _population.below(key, (batch_size,), total)
        slot = _population.nth(sampler, population.ring, geometry, nth)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        chance = jnp.float32(1) / jnp.maximum(total, jnp.int32(1)).astype(jnp.float32)
        return sampler, Draw(
            slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(
        self,
        sampler: Log,
        slot: jax.Array,
        error: jax.Array,
        geometry: Geometry,
        token: jax.Array,
    ) -> Log:
        return sampler

    def set(self, sampler: Log, **numbers: Any) -> Log:
        return sampler

    def clear(self, sampler: Log, geometry: Geometry, dense: bool) -> Log:
        return _population.clear(sampler)

    def stats(self, sampler: Log) -> dict[str, jax.Array]:
        return {}
