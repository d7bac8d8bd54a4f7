"""Draw every anchor with equal probability, or every episode, with replacement.

Nothing is stored where every row is an anchor. Otherwise a queue of anchors takes 4 bytes a row (`fbuf._indexing.anchor_log`),
and 8 more if episodes are drawn.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

from fbuf._algorithms import random
from fbuf._core.component import component
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import SlotRemap
from fbuf._core.slots import Geometry, sum_of_lanes
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue, EpisodeQueue
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected, Mass
from fbuf.samplers._base import LogSampler, masked_draw

Queue = AnchorQueue | EpisodeQueue | None


@component
class Uniform(LogSampler):
    """Draw every anchor with the same probability, or every episode, with replacement.

    Attributes:
      over: "anchors": every anchor is equally likely, so a long episode is drawn more often. "episodes": draw an episode with
        anchors first, then one of its anchors, each uniformly, as torchrl's slice sampler does. Rows of short episodes are then
        drawn more often. Overwritten rows do not count.

    Cost: O(1) a draw, and for each row that becomes or stops being an anchor. "anchors": 4 bytes a row if the view reads
    neighbours, else none. "episodes": 12 bytes a row. With `writers.Frozen` "anchors" takes no memory, and O(log C) a draw.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).sampler
      Uniform()
    """

    over: Literal["anchors", "episodes"] = "anchors"

    whole = ""
    moves = True

    @property
    def by_episode(self) -> bool:
        return self.over == "episodes"

    def init(self, geometry: Geometry, dense: bool) -> Queue:
        return anchor_log.init_episodes(geometry) if self.by_episode else anchor_log.init(geometry, dense)

    def change(self, sampler: Queue, change: AnchorChange, geometry: Geometry, token: Array) -> Queue:
        if isinstance(sampler, EpisodeQueue):
            return anchor_log.apply_episodes(sampler, change, geometry, token)
        return anchor_log.apply(sampler, change, geometry, token)

    def draw(
        self, sampler: Queue, key: Array, batch_size: int, anchors: AnchorSet, options: Leaves, token: Array
    ) -> tuple[Queue, Draw]:
        total = sum_of_lanes(anchors.counts)
        if isinstance(sampler, EpisodeQueue):
            slot, chance = anchor_log.draw_episodes(sampler, key, batch_size, anchors)
        else:
            random.consume(key)
            nth = random.randint_below(key, (batch_size,), total)
            slot = anchor_log.nth(sampler, anchors, nth)
            chance = jnp.float32(1) / jnp.maximum(total, jnp.int32(1)).astype(jnp.float32)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        return sampler, masked_draw(slot, chance, mask, anchors.geometry)

    def mass(self, sampler: Queue, anchors: AnchorSet) -> Mass:
        number = anchors.counts
        if isinstance(sampler, EpisodeQueue):
            number = anchor_log.episode_counts(sampler, anchors.geometry)
        zero = jnp.zeros((), jnp.float32)
        return Mass(jnp.sum(number, dtype=jnp.int32).astype(jnp.float32), zero, zero)

    def inspect(self, sampler: Queue, anchors: AnchorSet) -> Inspected:
        if isinstance(sampler, EpisodeQueue):
            return Inspected(anchor_log.episode_probabilities(sampler, anchors.geometry))
        return Inspected(None)

    def moved(self, sampler: Queue, remap: SlotRemap) -> Queue:
        if isinstance(sampler, EpisodeQueue):
            return anchor_log.moved_episodes(sampler, remap)
        return anchor_log.moved(sampler, remap)
