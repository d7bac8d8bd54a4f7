r"""`Prioritized`: anchors in proportion to their priority, with importance weights.

A leaf is :math:`(|p| + \epsilon)^\alpha`, an anchor's chance :math:`P(i) = leaf_i / \sum_k leaf_k`, its weight
:math:`(n P(i))^{-\beta}` with n the anchors there are. Leaves live in a sum tree (`fbuf._algorithms.sum_tree`) whose parents
are recomputed from their children, so nothing drifts; a row that is no anchor has leaf 0 and cannot be drawn. Values that
would break a tree (NaN, infinite, huge) never reach it. How priorities become leaves stands in
`fbuf.samplers._priority_leaves`, how a batch is chosen by them in `fbuf.samplers._prioritized_draw`, weights in
`fbuf._indexing.importance`; ranks are a sampler of their own (`Ranked`), as they share none of this.

Source: Schaul et al. 2016, "Prioritized Experience Replay", sections 3.3 and 3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import sum_tree
from fbuf._core.component import component
from fbuf._core.geometry import Geometry
from fbuf._core.lazy_import import Later
from fbuf._indexing import anchor_log
from fbuf._indexing.importance import importance
from fbuf._interfaces.sampler import Draw, EligibilityUpdate, EligibleSet, Inspected
from fbuf.samplers import _prioritized_draw, _priority_common, _priority_leaves
from fbuf.samplers._priority_leaves import PrioritizedState

if TYPE_CHECKING:
    from fbuf.samplers import _host_priorities
else:
    _host_priorities = Later("fbuf.samplers._host_priorities")

_NUMBERS = ("alpha", "beta", "eps", "uniform")


@component
class Prioritized:
    r"""Draws anchors with probability :math:`(|p| + \epsilon)^\alpha / \sum`.

    Attributes:
      alpha: 0 is uniform, 1 proportional. An annealed value (`buffer.set(state, alpha=...)`) applies to leaves as they
        are written, and to all with `buffer.rebuild(state)` (which needs largest="held").
      beta: Exponent of the importance weights; `sample(..., beta=...)` overrides it for one call.
      eps: Added to every magnitude, so that nothing is lost for ever.
      normalize: Weights are divided by the largest in the "batch", the largest possible in the "buffer" (one more tree;
        what torchrl does), or not at all (None).
      stratified: One draw from each of B equal shares of the total (less variance), or independent draws. Either way in
        random order, so that a part of a batch (of each device, or of a minibatch) is as good as any other.
      replace: False: no row twice in a batch. It holds what B draws one after another give, each in proportion to the leaves
        that are left (`stratified` then means nothing); where fewer than B leaves are above 0 it is short, `mask` False at
        its end. `probability` is then that of being in this batch, given when the others came, over B, so that
        weights mean the same: with beta=1 and normalize=None the mean over B of weight times f is an unbiased estimate
        of the mean of f (see `fbuf._algorithms.draw_without_replacement`).
      uniform: Share of the batch, 0 to 1, that is drawn from all anchors alike, whatever their priorities:
        P = (1 - uniform) leaf / sum + uniform / n. None: nothing, and it cannot be annealed; `sample(..., uniform=...)`
        overrides it for one call.
      largest: What new rows get unless `extend(..., priority=...)` gives one: the largest |p| "seen" so far, 1.0 at first, or
        the largest now "held" (1.0 where there is none), for which the priorities themselves are kept in one more tree.
      on: Where priorities live: "device", beside the rest of the state, or "host", in this process's memory behind callbacks.
        Wherever rows live, and with the same draws either way. On the host `replace`, `uniform` and `largest` keep their
        defaults.

    If every leaf is 0, all anchors are alike.

    With `on="host"` drawing from a state of long ago (256 writes, or fewer that changed an eighth of the leaves), or writing to
    it, is an error: "expired". Of two futures of one state that are both carried on, one comes to that: call `init` for each.
    `init` cannot be traced, nor the state be vmapped or span devices.

    `stats`: `max_priority` (the largest seen, or held), `alpha`, `beta`.

    Cost: O(log C) a draw or update; about 4.6 bytes a row (as much again with normalize="buffer", and with largest="held";
    4 more with `uniform` where the view looks at neighbours). On the host one callback each, and 5.2 bytes with
    normalize="buffer". replace=False: O(B log B log C) a batch.

    Sources: Schaul et al. 2016, sections 3.3 and 3.4; Kool et al. 2019 and Duffield et al. 2007 (replace=False).

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> sampler = fbuf.samplers.Prioritized(alpha=1.0, largest="held", replace=False, normalize=None)
      >>> buffer = fbuf.Buffer(capacity=100, sampler=sampler)
      >>> state = buffer.init(jnp.float32(0))
      >>> state = buffer.extend(state, jnp.arange(3.0), priority=jnp.array([1.0, 4.0, 9.0]))
      >>> state = buffer.rebuild(buffer.set(state, alpha=0.5))
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> sorted(batch.data[batch.mask].tolist())
      [0.0, 1.0, 2.0]
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    normalize: str | None = "batch"
    stratified: bool = True
    replace: bool = True
    uniform: float | None = None
    largest: str = "seen"
    on: str = "device"

    prioritized = True
    by_rank = True
    by_episode = False
    stamp = None
    most = {"uniform": 1.0}

    def __post_init__(self) -> None:
        _priority_common.check(self, _NUMBERS)
        if self.on not in ("device", "host"):
            raise ValueError(
                f'Prioritized: on is {self.on!r}; expected "device" or "host". Which device is that of the state: '
                f"jax.device_put(state, device)."
            )
        if self.on == "host":
            for name in ("replace", "uniform", "largest"):
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f'Prioritized: {name} is {getattr(self, name)!r} and on is "host", where there is no {name}; expected '
                        f'{getattr(type(self), name)!r}. Leave it out, or use on="device".'
                    )
        if self.uniform is not None and not self.replace:
            raise ValueError(
                f"Prioritized: uniform is {self.uniform!r} and replace is False, but a row drawn whatever its priority may "
                f"come twice. Drop one of them."
            )

    @property
    def numbers(self) -> Mapping[str, Any]:
        return _priority_common.numbers(self, _NUMBERS)

    @property
    def options(self) -> Mapping[str, Any]:
        return _priority_common.options(self)

    @property
    def rebuilds(self) -> str:
        return "" if self.largest == "held" else "sampler=fbuf.samplers.Prioritized(largest='held')"

    @property
    def on_host(self) -> bool:
        return self.on == "host"

    @property
    def _least(self) -> bool:
        """Whether the least leaf must be known."""
        return self.normalize == "buffer"

    def init(self, geometry: Geometry, dense: bool) -> PrioritizedState:
        capacity = geometry.capacity
        tree, low = _priority_leaves.init(capacity, self._least, self.on_host)
        return PrioritizedState(
            tree=tree,
            low=low,
            top=sum_tree.init(capacity, -jnp.inf) if self.largest == "held" else None,
            max_priority=jnp.ones((), jnp.float32),
            log=None if self.uniform is None or dense else anchor_log.init(geometry, dense),
            **_priority_common.initial(self, _NUMBERS),
        )

    def change(
        self, sampler: PrioritizedState, change: EligibilityUpdate, geometry: Geometry, token: jax.Array
    ) -> PrioritizedState:
        token = _priority_leaves.after(sampler, token)
        slot, given, largest = _priority_common.written(change, geometry.capacity)
        priority = jnp.where(given, change.priority.reshape(-1), sampler.max_priority)
        closed = jnp.zeros((change.close_slot.size,), jnp.float32)
        leaf = jnp.concatenate([closed, _priority_leaves.leaf_of(sampler, priority)])
        stored = jnp.concatenate([jnp.full_like(closed, -jnp.inf), priority])
        sampler = _priority_leaves.write(sampler, slot, leaf, stored, geometry, token)
        if sampler.log is not None:
            log = anchor_log.follow(sampler.log, change, geometry, token)
            sampler = dataclasses.replace(sampler, log=log)
        return _priority_leaves.seen(sampler, largest, token)

    def draw(
        self,
        sampler: PrioritizedState,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[PrioritizedState, Draw]:
        return self.draw_some(sampler, key, batch_size, jnp.int32(batch_size), eligible, options, token)

    def draw_some(
        self,
        sampler: PrioritizedState,
        key: jax.Array,
        batch_size: int,
        wanted: jax.Array,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[PrioritizedState, Draw]:
        del token
        number = jnp.sum(eligible.available, dtype=jnp.int32).astype(jnp.float32)
        if self.replace:
            share = options.get("uniform", sampler.uniform)
            chosen = _prioritized_draw.with_replacement(
                sampler, key, batch_size, eligible, number, share, self.stratified
            )
            mask = chosen.mask & (lax.iota(np.int32, batch_size) < wanted)
        else:
            chosen = _prioritized_draw.without_replacement(sampler, key, batch_size, wanted, eligible, number)
            mask = chosen.mask
        slot, _, chance, least = chosen
        beta = options.get("beta", sampler.beta)
        return sampler, Draw(
            slot=jnp.where(mask, slot, jnp.int32(eligible.geometry.capacity)),
            probability=jnp.where(mask, chance, jnp.float32(0)),
            weight=importance(number, chance, mask, beta, self.normalize, least),
            mask=mask,
        )

    def update(
        self, sampler: PrioritizedState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
    ) -> PrioritizedState:
        return _priority_leaves.update(sampler, slot, error, geometry, token)

    def rebuild(self, sampler: PrioritizedState, geometry: Geometry, token: jax.Array) -> PrioritizedState:
        return _priority_leaves.rebuild(sampler, geometry, token)

    def set(self, sampler: PrioritizedState, **numbers: Any) -> PrioritizedState:
        return dataclasses.replace(sampler, **numbers)

    def clear(self, sampler: PrioritizedState, geometry: Geometry, dense: bool) -> PrioritizedState:
        annealed = {name: getattr(sampler, name) for name in self.numbers}
        empty = dataclasses.replace(self.init(geometry, dense), **annealed)
        return dataclasses.replace(empty, tree=_host_priorities.cleared(sampler.tree)) if self.on_host else empty

    def open(self, call: str, sampler: PrioritizedState, geometry: Geometry) -> PrioritizedState:
        return dataclasses.replace(sampler, tree=_host_priorities.open(call, geometry.capacity, self._least))

    def with_capacity(self, sampler: PrioritizedState, geometry: Geometry) -> PrioritizedState:
        leaves = _host_priorities.leaves(sampler.tree)
        return dataclasses.replace(
            sampler, tree=_host_priorities.open("Buffer.grow", geometry.capacity, self._least, leaves)
        )

    def plan_host(self, geometry: Geometry) -> int:
        return _host_priorities.most_bytes(geometry.capacity, self._least)

    def host_bytes(self, sampler: PrioritizedState) -> int:
        return _host_priorities.store_of(sampler.tree).nbytes

    def available(self, sampler: PrioritizedState, count: jax.Array) -> jax.Array:
        return count

    def to_host(self, sampler: PrioritizedState) -> Any:
        return _host_priorities.leaves(sampler.tree) if self.on_host else None

    def inspect(self, sampler: PrioritizedState, eligible: EligibleSet, fetched: Any) -> Inspected:
        capacity = eligible.geometry.capacity
        leaf = sampler.tree[:capacity] if fetched is None else fetched
        number = jnp.maximum(jnp.sum(eligible.available, dtype=jnp.int32), jnp.int32(1)).astype(jnp.float32)
        mass = jnp.sum(leaf) if self.on_host else sum_tree.root(sampler.tree)
        each = leaf / jnp.where(mass > jnp.float32(0), mass, jnp.float32(1))
        chance = jnp.where(mass > jnp.float32(0), each, jnp.float32(1) / number)
        return Inspected(
            _priority_common.shared(chance, sampler.uniform, eligible), _priority_leaves.priority_of(sampler, leaf)
        )

    def stats(self, sampler: PrioritizedState) -> dict[str, jax.Array]:
        # scalars of the state only: reading the tree here would make a later write in the same step copy it
        return {
            "max_priority": sampler.max_priority,
            "alpha": sampler.alpha,
            "beta": sampler.beta,
        }
