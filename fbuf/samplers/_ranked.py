r"""Draw anchors by the rank of their priority, which outliers cannot distort.

The probability is :math:`rank(i)^{-\alpha} / \sum_k rank(k)^{-\alpha}`, with rank 1 for the largest |p|. The rows are kept in
buckets of magnitude (`fbuf._algorithms.rank_buckets`). No leaves are stored, so a new alpha applies to every row.

Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf._algorithms import random, rank_buckets
from fbuf._algorithms.rank_buckets import Ranks
from fbuf._core.component import component, state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import Prefix, SlotRemap
from fbuf._core.slots import Geometry, Ranges, lengthened, sum_of_lanes
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected
from fbuf._members.weights import finite_exponent
from fbuf.samplers import _base
from fbuf.samplers._base import PrioritySampler


@state
class RankedState:
    """Hold the rows in order, and the numbers that `buffer.set` anneals."""

    ranks: Ranks
    log: AnchorQueue | None  # the anchors; with uniform, unless every row is one
    numbers: Array  # float32[3 or 4]

    max_priority = _base.Number(0)  # largest |p| seen; 1 at first
    alpha = _base.Number(1)
    beta = _base.Number(2)
    uniform = _base.Number(3)

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "max_priority", np.asarray(self.numbers)[:1], 0, _base.LARGEST


@component
class Ranked(PrioritySampler):
    r"""Draw anchors with probability :math:`rank^{-\alpha} / \sum`, with replacement; rank 1 is the largest |p|.

    Attributes:
      alpha: 0 is uniform. An annealed value (`buffer.set(state, alpha=...)`) applies to all rows at once.
      beta: Exponent of the importance weights; `sample(..., beta=...)` overrides it for one call.
      normalize: Divide weights by the largest in the "batch", the largest possible in the "buffer", or not at all (None).
      stratified: Draw one row from each of B equal shares of the total, for less variance, or independently; in random order.
      uniform: As for `Prioritized`.
      largest: Priority of new rows without `extend(..., priority=...)`: the largest |p| "seen" so far, 1.0 at first, or tied
        with the largest now "held" (1.0 if there is none, or all are 0).

    Rows whose magnitudes agree in the exponent and the top three mantissa bits (within 6 to 12 %) are tied, and so are rows
    beyond 2^32 and below 2^-32. Tied rows share the probabilities of the ranks they fill. Ranks are always current: nothing
    is sorted. A row of priority 0 can be drawn too.

    `stats`: `max_priority` (the largest seen), `alpha`, `beta`.

    Cost: O(log C) a draw or update, and 512 masses a batch; about 7 bytes a row (4 more with `uniform` if the view reads
    neighbours) and 40 KiB.

    Source: Schaul et al. 2016, section 3.3 (alpha=0.7, beta=0.5).

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Ranked(alpha=1.0))
      >>> state = buffer.init(jnp.float32(0))
      >>> state = buffer.extend(state, jnp.arange(3.0), priority=jnp.array([1.0, 1e9, 5.0]))
      >>> batch = buffer.peek(state, jax.random.key(0), 11)
      >>> [int((batch.data == x).sum()) for x in (1.0, 2.0, 0.0)]  # 1 : 1/2 : 1/3
      [6, 3, 2]
    """

    alpha: float = 0.7
    beta: float = 0.5
    normalize: Literal["batch", "buffer", None] = "batch"
    stratified: bool = True
    uniform: float | None = None
    largest: Literal["seen", "held"] = "seen"

    moves = True
    annealed = ("alpha", "beta", "uniform")

    def init(self, geometry: Geometry, dense: bool) -> RankedState:
        return RankedState(
            ranks=rank_buckets.init(geometry.capacity),
            log=self._initial_queue(geometry, dense),
            numbers=self._initial_numbers(),
        )

    def change(self, sampler: RankedState, change: AnchorChange, geometry: Geometry, token: Array) -> RankedState:
        slot, has_priority, largest = _base.written_slots(change, geometry.capacity)
        first = rank_buckets.bucket_of(sampler.max_priority)
        if self.largest == "held":
            token, highest = order_after_reads(token, rank_buckets.highest(sampler.ranks))
            least = rank_buckets.bucket_of(jnp.zeros((), jnp.float32))
            first = jnp.where(highest > least, highest, rank_buckets.bucket_of(jnp.ones((), jnp.float32)))
        bucket = jnp.where(has_priority, rank_buckets.bucket_of(change.priority.reshape(-1)), first)
        closed = jnp.zeros((change.close_slot.size,), jnp.int32)
        if largest is not None:
            sampler = _base.with_larger(sampler, largest)
        return dataclasses.replace(
            sampler,
            ranks=rank_buckets.set(sampler.ranks, slot, jnp.concatenate([closed, bucket]), geometry.capacity, token),
            log=anchor_log.apply(sampler.log, change, geometry, token),
        )

    def draw(
        self, sampler: RankedState, key: Array, batch_size: int, anchors: AnchorSet, options: Leaves, token: Array
    ) -> tuple[RankedState, Draw]:
        ranks, capacity = sampler.ranks, anchors.geometry.capacity
        number = sum_of_lanes(anchors.counts).astype(jnp.float32)
        some = jnp.broadcast_to(number > jnp.float32(0), (batch_size,))
        now = rank_buckets.table(ranks, finite_exponent(sampler.alpha))
        slot, chance = rank_buckets.draw(ranks, now, key, batch_size, capacity, stratified=self.stratified)
        if self.stratified:
            order = random.permutation(key, batch_size)
            slot, chance = slot[order], chance[order]
        least = jnp.min(jnp.where(ranks.total > jnp.int32(0), now.each, jnp.float32(1)))
        if sampler.uniform is not None:
            share = _base.clip_unit(options.get("uniform", sampler.uniform))
            slot = _base.mix_uniform(slot, key, share, anchors, sampler.log, some, stratified=self.stratified)
            index = jnp.maximum(rank_buckets.get(ranks, slot) - jnp.int32(1), jnp.int32(0))
            chance = _base.mixed_probability(now.each[index], share, number)
            least = _base.mixed_probability(least, share, number)
        beta = options.get("beta", sampler.beta)
        weight = _base.importance_weights(number, chance, some, beta, self.normalize, least)
        return sampler, _base.masked_draw(slot, chance, some, anchors.geometry, weight)

    def update(self, sampler: RankedState, slot: Array, error: Array, geometry: Geometry, token: Array) -> RankedState:
        capacity, priority = geometry.capacity, jnp.abs(error)
        ranks = rank_buckets.set(sampler.ranks, slot, rank_buckets.bucket_of(priority), capacity, token)
        largest = jnp.maximum(sampler.max_priority, _base.largest_written(slot, priority, capacity))
        return dataclasses.replace(_base.with_numbers(sampler, max_priority=largest), ranks=ranks)

    def rebuild(self, sampler: RankedState, geometry: Geometry, token: Array) -> RankedState:
        return sampler

    def priority(self, sampler: RankedState, slot: Array) -> Array:
        bucket = rank_buckets.get(sampler.ranks, slot)
        return jnp.where(bucket > jnp.int32(1), rank_buckets.lower_edge(bucket), jnp.float32(0))

    def inspect(self, sampler: RankedState, anchors: AnchorSet) -> Inspected:
        ranks = sampler.ranks
        bucket = ranks.bucket[: anchors.geometry.capacity].astype(jnp.int32)
        each = rank_buckets.table(ranks, finite_exponent(sampler.alpha)).each[
            jnp.maximum(bucket - jnp.int32(1), jnp.int32(0))
        ]
        chance = jnp.where(bucket > jnp.int32(0), each, jnp.float32(0))
        number = sum_of_lanes(anchors.counts).astype(jnp.float32)
        return Inspected(_base.mixed_probability(chance, sampler.uniform, number))

    def grown(self, sampler: RankedState, fresh: RankedState, geometry: Geometry, capacity: int) -> RankedState:
        log = jax.tree.map(lengthened, sampler.log, fresh.log)
        return dataclasses.replace(
            sampler, log=log, ranks=rank_buckets.grown(sampler.ranks, capacity, geometry.capacity)
        )

    def moved(self, sampler: RankedState, remap: SlotRemap) -> RankedState:
        bucket = remap.by_slot(np.asarray(sampler.ranks.bucket)[: remap.before.capacity], 0)
        log = anchor_log.moved(sampler.log, remap)
        return dataclasses.replace(sampler, ranks=rank_buckets.of_buckets(jnp.asarray(bucket)), log=log)

    def saved(self, sampler: RankedState, capacity: int) -> Any:
        return dataclasses.replace(sampler, ranks=Prefix(sampler.ranks.bucket, capacity))  # type: ignore[arg-type]

    def loaded(self, saved: Any, capacity: int) -> RankedState:
        return dataclasses.replace(saved, ranks=rank_buckets.of_buckets(saved.ranks))
