r"""`Prioritized`: anchors in proportion to their priority, with importance weights.

A leaf is :math:`(|p| + \epsilon)^\alpha`, an anchor's chance :math:`P(i) = leaf_i / \sum_k leaf_k`, its weight
:math:`(n P(i))^{-\beta}` with n the anchors there are. Leaves live in a sum tree (`fbuf._sumtree`) whose parents are
recomputed from their children, so nothing drifts; a row that is no anchor has leaf 0 and cannot be drawn. Values that
would break a tree (NaN, infinite, huge) never reach it.

Source: Schaul et al. 2016, "Prioritized Experience Replay", sections 3.3 and 3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf import _anchors, _permutation, _population, _sumtree
from fbuf._config import component, state
from fbuf._typing import Change, Draw, Geometry, Population

_LARGEST_LEAF = 2.0**100  # 2^27 of them still have a finite float32 sum


@state
class PrioritizedState:
    """Leaves, and the numbers a user may anneal without compiling again (`buffer.set`)."""

    tree: jax.Array  # float32[nodes], sums
    low: jax.Array  # float32[nodes], minima of the positive leaves; [0] unless normalize="buffer"
    max_priority: jax.Array  # float32[], largest |p| seen; 1 at first
    alpha: jax.Array  # float32[]
    beta: jax.Array  # float32[]
    eps: jax.Array  # float32[]


@component
class Prioritized:
    r"""Draws anchors with probability :math:`(|p| + \epsilon)^\alpha / \sum`, with replacement.

    Attributes:
      alpha: 0 is uniform, 1 proportional. An annealed value (`buffer.set(state, alpha=...)`) applies to leaves as they
        are written.
      beta: Exponent of the importance weights; `sample(..., beta=...)` overrides it for one call.
      eps: Added to every magnitude, so that nothing is lost for ever.
      normalize: Weights are divided by the largest in the "batch", the largest possible in the "buffer" (one more tree),
        or not at all (None).
      stratified: One draw from each of B equal shares of the total (less variance), or independent draws. Either way in
        random order, so that a part of a batch (of each device, or of a minibatch) is as good as any other.

    New rows get the largest priority seen so far, 1.0 at first, unless `extend(..., priority=...)` gives one. If every
    leaf is 0, all anchors are alike.

    Cost: O(log C) a draw or update; about 4.6 bytes a row (9.2 with normalize="buffer").

    Example:
      >>> import fbuf
      >>> fbuf.samplers.Prioritized(alpha=0.6).beta
      0.4
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    normalize: str | None = "batch"
    stratified: bool = True

    numbers: ClassVar[Mapping[str, Any]] = dict.fromkeys(("alpha", "beta", "eps"), np.float32)
    options: ClassVar[Mapping[str, Any]] = {"beta": np.float32}
    prioritized: ClassVar[bool] = True
    by_episode: ClassVar[bool] = False
    stamp: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "eps"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise ValueError(
                    f"Prioritized: {name} is {value!r}; expected a finite Python number >= 0. Numbers that change go "
                    f"through buffer.set(state, {name}=...) or sample(..., beta=...)."
                )
            object.__setattr__(self, name, float(value))
        if self.normalize not in ("batch", "buffer", None):
            raise ValueError(f'Prioritized: normalize is {self.normalize!r}; expected "batch", "buffer" or None.')

    def init(self, geometry: Geometry, dense: bool) -> PrioritizedState:
        capacity = geometry.capacity
        low = _sumtree.init(capacity, jnp.inf) if self.normalize == "buffer" else jnp.zeros((0,), jnp.float32)
        return PrioritizedState(
            tree=_sumtree.init(capacity),
            low=low,
            max_priority=jnp.ones((), jnp.float32),
            alpha=jnp.full((), self.alpha, jnp.float32),
            beta=jnp.full((), self.beta, jnp.float32),
            eps=jnp.full((), self.eps, jnp.float32),
        )

    def change(
        self, sampler: PrioritizedState, change: Change, geometry: Geometry, token: jax.Array
    ) -> PrioritizedState:
        given = change.priority >= jnp.float32(0)
        largest = jnp.max(jnp.where(given & change.open_mask, change.priority, jnp.float32(0)), initial=0.0)
        priority = jnp.where(given, change.priority, sampler.max_priority)
        leaf = self._leaf(sampler, priority)
        nowhere = jnp.int32(geometry.capacity)
        slot = jnp.concatenate(
            [
                jnp.where(change.close_mask, change.close_slot, nowhere).reshape(-1),
                jnp.where(change.open_mask, change.open_slot, nowhere).reshape(-1),
            ]
        )
        closed = jnp.zeros((change.close_slot.size,), jnp.float32)
        sampler = self._write(sampler, slot, jnp.concatenate([closed, leaf.reshape(-1)]), geometry, token)
        return self._seen(sampler, largest)

    def draw(
        self,
        sampler: PrioritizedState,
        key: jax.Array,
        batch_size: int,
        population: Population,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[PrioritizedState, Draw]:
        del token
        geometry = population.geometry
        capacity = jnp.int32(geometry.capacity)
        total = jnp.sum(population.available, dtype=jnp.int32)
        number = total.astype(jnp.float32)
        mass = _sumtree.root(sampler.tree)
        some = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        slot, leaf = _sumtree.draw(sampler.tree, key, batch_size, geometry.capacity, stratified=self.stratified)
        if self.stratified:  # one share after another: half a batch would be the older half of the buffer
            order = _permutation.mixed(jax.random.fold_in(key, 2), batch_size)
            slot, leaf = slot[order], leaf[order]
        flat = mass <= jnp.float32(0)  # every leaf is 0: all anchors alike

        def alike(slot: jax.Array, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
            nth = _population.below(jax.random.fold_in(key, 1), (batch_size,), total)
            if population.flags is None:
                every = _population.init(geometry, dense=True)
                return _population.nth(every, population.ring, geometry, nth), jnp.ones_like(leaf)
            wanted = some & flat
            return _anchors.nth_open(population.flags, geometry, nth, wanted), jnp.ones_like(leaf)

        slot, leaf = lax.cond(flat, alike, lambda slot, leaf: (slot, leaf), slot, leaf)
        mass = jnp.where(flat, jnp.maximum(number, jnp.float32(1)), mass)
        probability = jnp.where(some, leaf / mass, jnp.float32(0))
        beta = options.get("beta", sampler.beta)
        safe = jnp.where(some, probability, jnp.float32(1))
        weight = self._power(number, safe, beta)
        if self.normalize == "batch":
            top = jnp.max(jnp.where(some, weight, jnp.float32(0)))
            weight = weight / jnp.where(top > jnp.float32(0), top, jnp.float32(1))
        elif self.normalize == "buffer":
            least = jnp.where(
                flat | ~jnp.isfinite(_sumtree.root(sampler.low)),
                leaf[0],
                _sumtree.root(sampler.low),
            )
            weight = weight / self._power(number, jnp.where(some[0], least / mass, jnp.float32(1)), beta)
        return sampler, Draw(
            slot=jnp.where(some, slot, capacity),
            probability=probability,
            weight=jnp.where(some, weight, jnp.float32(0)),
            mask=some,
        )

    def update(
        self,
        sampler: PrioritizedState,
        slot: jax.Array,
        error: jax.Array,
        geometry: Geometry,
        token: jax.Array,
    ) -> PrioritizedState:
        priority = jnp.abs(error)
        sampler = self._write(sampler, slot, self._leaf(sampler, priority), geometry, token)
        real = slot < jnp.int32(geometry.capacity)
        return self._seen(sampler, jnp.max(jnp.where(real, priority, jnp.float32(0)), initial=0.0))

    def set(self, sampler: PrioritizedState, **numbers: Any) -> PrioritizedState:
        return dataclasses.replace(sampler, **numbers)

    def clear(self, sampler: PrioritizedState, geometry: Geometry, dense: bool) -> PrioritizedState:
        annealed = {name: getattr(sampler, name) for name in self.numbers}
        return dataclasses.replace(self.init(geometry, dense), **annealed)

    def available(self, sampler: PrioritizedState, count: jax.Array) -> jax.Array:
        return count

    def stats(self, sampler: PrioritizedState) -> dict[str, jax.Array]:
        # scalars of the state only: reading the tree here would make a later write in the same step copy it
        return {
            "max_priority": sampler.max_priority,
            "alpha": sampler.alpha,
            "beta": sampler.beta,
        }

    def _leaf(self, sampler: PrioritizedState, priority: jax.Array) -> jax.Array:
        """(|p| + eps)^alpha, finite and >= 0 whatever numbers were annealed to."""
        leaf = jnp.power(priority + jnp.maximum(sampler.eps, jnp.float32(0)), sampler.alpha)
        return jnp.where(leaf >= jnp.float32(0), jnp.minimum(leaf, jnp.float32(_LARGEST_LEAF)), jnp.float32(0))

    @staticmethod
    def _power(number: jax.Array, probability: jax.Array, beta: jax.Array) -> jax.Array:
        """(n P)^-beta, finite: a leaf may be far below the float32 resolution of the total."""
        product = jnp.maximum(number * probability, jnp.float32(1e-30))
        exponent = jnp.where(beta >= jnp.float32(0), beta, jnp.float32(0))  # NaN as well
        return jnp.minimum(jnp.power(product, -exponent), jnp.float32(1e30))

    def _write(
        self, sampler: PrioritizedState, slot: jax.Array, leaf: jax.Array, geometry: Geometry, token: jax.Array
    ) -> PrioritizedState:
        slot = slot + token
        if self.normalize != "buffer":
            return dataclasses.replace(sampler, tree=_sumtree.set(sampler.tree, slot, leaf, geometry.capacity))
        lowest = jnp.where(leaf > jnp.float32(0), leaf, jnp.float32(jnp.inf))
        trees, leaves = (sampler.tree, sampler.low), (leaf, lowest)
        tree, low = _sumtree.set_all(trees, slot, leaves, geometry.capacity, reduce=("sum", "min"))
        return dataclasses.replace(sampler, tree=tree, low=low)

    @staticmethod
    def _seen(sampler: PrioritizedState, largest: jax.Array) -> PrioritizedState:
        return dataclasses.replace(sampler, max_priority=jnp.maximum(sampler.max_priority, largest))
