r"""`Ranked`: anchors by the rank of their priority, not by its size; what outliers cannot spoil.

An anchor's chance is :math:`rank(i)^{-\alpha} / \sum_k rank(k)^{-\alpha}`, rank 1 being the largest |p|. How rows are kept in
order, and what counts as tied, stands in `fbuf._algorithms.rank_buckets`.

It is not an option of `Prioritized`: it stores no leaves, so an annealed alpha applies at once, without eps or `rebuild`.

Source: Schaul et al. 2016, "Prioritized Experience Replay", section 3.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._algorithms import permutation, rank_buckets
from fbuf._algorithms.rank_buckets import Ranks
from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry
from fbuf._core.ordering import order_after_reads
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import Log
from fbuf._indexing.importance import exponent, importance, unit
from fbuf._interfaces.sampler import Draw, EligibilityUpdate, EligibleSet, Inspected
from fbuf.samplers import _priority_common

_NUMBERS = ("alpha", "beta", "uniform")


@state
class RankedState:
    """Rows in order, and the numbers a user may anneal without compiling again (`buffer.set`)."""

    ranks: Ranks
    log: Log | None  # the anchors in order; with uniform, where not every row is one
    max_priority: jax.Array  # float32[], largest |p| seen; 1 at first
    alpha: jax.Array  # float32[]
    beta: jax.Array  # float32[]
    uniform: jax.Array | None  # float32[]


@component
class Ranked:
    r"""Draws anchors with probability :math:`rank^{-\alpha} / \sum`, with replacement; rank 1 is the largest |p|.

    Attributes:
      alpha: 0 is uniform. An annealed value (`buffer.set(state, alpha=...)`) applies to all rows at once.
      beta: Exponent of the importance weights; `sample(..., beta=...)` overrides it for one call.
      normalize: Weights are divided by the largest in the "batch", the largest possible in the "buffer", or not at all (None).
      stratified: One draw from each of B equal shares of the total (less variance), or independent draws; in random order.
      uniform: As of `Prioritized`.
      largest: What new rows get unless `extend(..., priority=...)` gives one: the largest |p| "seen" so far, 1.0 at first, or a
        rank among the first of those now "held".

    Rows whose magnitudes agree in the power of two and the next three bits (they differ by less than 6 to 12 %) are tied, and
    so are those beyond 2^32 and below 2^-32: tied rows share the chances of the ranks they fill together. Ranks are those of
    this moment, whatever was written since the last draw: nothing is ever sorted. A row of priority 0 can be drawn too.

    `stats`: `max_priority` (the largest seen), `alpha`, `beta`.

    Cost: O(log C) a draw or update, and 512 masses a batch; about 7 bytes a row (4 more with `uniform` where the view looks at
    neighbours) and 40 KiB.

    Source: Schaul et al. 2016, section 3.3 (alpha=0.7, beta=0.5 are theirs).

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
    normalize: str | None = "batch"
    stratified: bool = True
    uniform: float | None = None
    largest: str = "seen"

    prioritized = True
    by_rank = True
    by_episode = False
    stamp = None
    most = {"uniform": 1.0}
    rebuilds = ""

    def __post_init__(self) -> None:
        _priority_common.check(self, _NUMBERS)

    @property
    def numbers(self) -> Mapping[str, Any]:
        return _priority_common.numbers(self, _NUMBERS)

    @property
    def options(self) -> Mapping[str, Any]:
        return _priority_common.options(self)

    def init(self, geometry: Geometry, dense: bool) -> RankedState:
        return RankedState(
            ranks=rank_buckets.init(geometry.capacity),
            log=None if self.uniform is None or dense else anchor_log.init(geometry, dense),
            max_priority=jnp.ones((), jnp.float32),
            **_priority_common.initial(self, _NUMBERS),
        )

    def change(
        self, sampler: RankedState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> RankedState:
        slot, given, largest = _priority_common.written(change, geometry.capacity)
        first = rank_buckets.bucket_of(sampler.max_priority)
        if self.largest == "held":
            token, held = order_after_reads(token, rank_buckets.highest(sampler.ranks))
            first = jnp.where(held > jnp.int32(0), held, rank_buckets.bucket_of(jnp.ones((), jnp.float32)))
        bucket = jnp.where(given, rank_buckets.bucket_of(change.priority.reshape(-1)), first)
        closed = jnp.zeros((change.close_slot.size,), jnp.int32)
        return dataclasses.replace(
            sampler,
            ranks=rank_buckets.set(sampler.ranks, slot, jnp.concatenate([closed, bucket]), geometry.capacity, token),
            log=None if sampler.log is None else anchor_log.follow(sampler.log, change, geometry, token),
            max_priority=jnp.maximum(sampler.max_priority, largest),
        )

    def draw(
        self,
        sampler: RankedState,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[RankedState, Draw]:
        del token
        ranks, capacity = sampler.ranks, eligible.geometry.capacity
        number = jnp.sum(eligible.available, dtype=jnp.int32).astype(jnp.float32)
        some = jnp.broadcast_to(number > jnp.float32(0), (batch_size,))
        now = rank_buckets.table(ranks, exponent(sampler.alpha))
        slot, chance = rank_buckets.draw(ranks, now, key, batch_size, capacity, stratified=self.stratified)
        if self.stratified:
            order = permutation.mixed(jax.random.fold_in(key, 2), batch_size)
            slot, chance = slot[order], chance[order]
        least = jnp.min(jnp.where(ranks.total > jnp.int32(0), now.each, jnp.float32(1)))
        if sampler.uniform is not None:
            share = unit(options.get("uniform", sampler.uniform))
            slot = _priority_common.sharing(slot, key, share, eligible, sampler.log, some, stratified=self.stratified)
            index = jnp.maximum(rank_buckets.get(ranks, slot) - jnp.int32(1), jnp.int32(0))
            each = share / jnp.maximum(number, jnp.float32(1))
            chance = (jnp.float32(1) - share) * now.each[index] + each
            least = (jnp.float32(1) - share) * least + each
        beta = options.get("beta", sampler.beta)
        return sampler, Draw(
            slot=jnp.where(some, slot, jnp.int32(capacity)),
            probability=jnp.where(some, chance, jnp.float32(0)),
            weight=importance(number, chance, some, beta, self.normalize, least),
            mask=some,
        )

    def update(
        self, sampler: RankedState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
    ) -> RankedState:
        capacity, priority = geometry.capacity, jnp.abs(error)
        ranks = rank_buckets.set(sampler.ranks, slot, rank_buckets.bucket_of(priority), capacity, token)
        real = slot < jnp.int32(capacity)
        largest = jnp.max(jnp.where(real, priority, jnp.float32(0)), initial=0.0)
        return dataclasses.replace(sampler, ranks=ranks, max_priority=jnp.maximum(sampler.max_priority, largest))

    def rebuild(self, sampler: RankedState, geometry: Geometry, token: jax.Array) -> RankedState:
        return sampler

    def set(self, sampler: RankedState, **numbers: Any) -> RankedState:
        return dataclasses.replace(sampler, **numbers)

    def clear(self, sampler: RankedState, geometry: Geometry, dense: bool) -> RankedState:
        annealed = {name: getattr(sampler, name) for name in self.numbers}
        return dataclasses.replace(self.init(geometry, dense), **annealed)

    def available(self, sampler: RankedState, count: jax.Array) -> jax.Array:
        return count

    def inspect(self, sampler: RankedState, eligible: EligibleSet, fetched: None) -> Inspected:
        ranks = sampler.ranks
        bucket = ranks.bucket[: eligible.geometry.capacity].astype(jnp.int32)
        each = rank_buckets.table(ranks, exponent(sampler.alpha)).each[jnp.maximum(bucket - jnp.int32(1), jnp.int32(0))]
        chance = jnp.where(bucket > jnp.int32(0), each, jnp.float32(0))
        known = jnp.where(bucket > jnp.int32(1), rank_buckets.lower_edge(bucket), jnp.float32(0))
        return Inspected(_priority_common.shared(chance, sampler.uniform, eligible), known)

    def stats(self, sampler: RankedState) -> dict[str, jax.Array]:
        return {"max_priority": sampler.max_priority, "alpha": sampler.alpha, "beta": sampler.beta}
