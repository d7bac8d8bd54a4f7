"""`Uniform`: every anchor alike, or every episode, with replacement; O(1) a draw.

Where every row is an anchor nothing is stored. Otherwise a log of 4 bytes a row, kept as rows arrive (see
`fbuf._indexing.anchor_log`), and 8 more where episodes are drawn. Rejection from all rows was not taken: its time is
unbounded, and a fixed number of tries is biased.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._algorithms import random_bits
from fbuf._core.component import component
from fbuf._core.geometry import Geometry
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import EpisodeLog, Log
from fbuf._interfaces.sampler import NO_NUMBERS, Draw, EligibilityUpdate, EligibleSet, Inspected


@component
class Uniform:
    """Draws every anchor with the same probability, or every episode, with replacement.

    Attributes:
      over: "anchors": all are alike, so that an episode is drawn from as often as it is long. "episodes": an episode with
        anchors first, all alike, then one of its anchors, all alike (what torchrl's slice sampler does): a row of a short
        episode is drawn more often than one of a long episode. What has been overwritten of an episode does not count.

    Cost: O(1) a draw and an anchor that opens or closes. "anchors": 4 bytes a row where the view looks at neighbours,
    else none; "episodes": 12 bytes a row. With `writers.Frozen` "anchors" takes none, and O(log C) a draw.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).sampler
      Uniform()
    """

    over: str = "anchors"

    numbers = NO_NUMBERS
    options = NO_NUMBERS
    prioritized = False
    by_rank = True
    stamp = None

    def __post_init__(self) -> None:
        if self.over not in ("anchors", "episodes"):
            raise ValueError(f'Uniform: over is {self.over!r}; expected "anchors" or "episodes".')

    @property
    def by_episode(self) -> bool:
        return self.over == "episodes"

    def init(self, geometry: Geometry, dense: bool) -> Log | EpisodeLog:
        return anchor_log.init_episodes(geometry) if self.by_episode else anchor_log.init(geometry, dense)

    def change(
        self, sampler: Log | EpisodeLog, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> Log | EpisodeLog:
        if isinstance(sampler, EpisodeLog):
            return anchor_log.follow_episodes(sampler, change, geometry, token)
        return anchor_log.follow(sampler, change, geometry, token)

    def draw(
        self,
        sampler: Log | EpisodeLog,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Log | EpisodeLog, Draw]:
        del options, token
        geometry = eligible.geometry
        total = jnp.sum(eligible.available, dtype=jnp.int32)
        if isinstance(sampler, EpisodeLog):
            slot, chance = anchor_log.draw_episodes(sampler, key, batch_size, eligible)
        else:
            nth = random_bits.randint_below(key, (batch_size,), total)
            slot = anchor_log.nth(sampler, eligible, nth)
            chance = jnp.float32(1) / jnp.maximum(total, jnp.int32(1)).astype(jnp.float32)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        return sampler, Draw(
            slot=jnp.where(mask, slot, jnp.int32(geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(
        self,
        sampler: Log | EpisodeLog,
        slot: jax.Array,
        error: jax.Array,
        geometry: Geometry,
        token: jax.Array,
    ) -> Log | EpisodeLog:
        return sampler

    def set(self, sampler: Log | EpisodeLog, **numbers: Any) -> Log | EpisodeLog:
        return sampler

    def clear(self, sampler: Log | EpisodeLog, geometry: Geometry, dense: bool) -> Log | EpisodeLog:
        return anchor_log.clear_episodes(sampler) if isinstance(sampler, EpisodeLog) else anchor_log.clear(sampler)

    def available(self, sampler: Log | EpisodeLog, count: jax.Array) -> jax.Array:
        return count

    def inspect(self, sampler: Log | EpisodeLog, eligible: EligibleSet, fetched: None) -> Inspected:
        if isinstance(sampler, EpisodeLog):
            return Inspected(anchor_log.chances_by_episode(sampler, eligible.geometry))
        return Inspected(None)

    def stats(self, sampler: Log | EpisodeLog) -> dict[str, jax.Array]:
        return {}
