r"""Draw anchors in proportion to their priority, with importance weights.

A leaf is :math:`(|p| + \epsilon)^\alpha`, the probability of an anchor :math:`P(i) = leaf_i / \sum_k leaf_k`, its weight
:math:`(n P(i))^{-\beta}` for n anchors. Leaves are in a sum tree (`fbuf._algorithms.sum_tree`); a row that is no anchor has
leaf 0 and cannot be drawn. `fbuf._buffer.priorities` refuses NaN and infinite errors. On request a tree of
minima holds the leaves too, for weights by the buffer, and a tree of maxima the priorities, for the largest one held.
`fbuf.samplers._base` computes weights.

Source: Schaul et al. 2016, "Prioritized Experience Replay", sections 3.3 and 3.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import draw_without_replacement, random, sum_tree
from fbuf._algorithms.random import fresh_key
from fbuf._core import control_flow
from fbuf._core.component import component, state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import OnHost
from fbuf._core.lazy_import import Later
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import Prefix, SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ranges, lengthened, sum_of_lanes
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.anchors import MOST_COUNTED
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Inspected, Mass
from fbuf._members.weights import finite_exponent
from fbuf.samplers import _base
from fbuf.samplers._base import PrioritySampler

if TYPE_CHECKING:
    from fbuf.samplers import _host_priorities
else:
    _host_priorities = Later("fbuf.samplers._host_priorities")

MAX_LEAF = 2.0**96  # 2^30 of them have a finite float32 sum, whose inverse is normal
BLOCK = 1024  # leaves of one iteration of `rebuild`


@state
class PrioritizedState:
    """Hold the leaves, and the numbers that `buffer.set` anneals. Optional parts are None."""

    tree: Any  # float32[nodes], sums; on the host a `HostTree`
    # float32[nodes], minima of the leaves that can be drawn; with normalize="buffer", not on the host.
    low: Array | None
    top: Array | None  # float32[nodes], maxima of |p|, -inf where no anchor is; with largest="held"
    log: AnchorQueue | None  # the anchors; with uniform, unless every row is one
    numbers: Array  # float32[4 or 5]

    max_priority = _base.Number(0)  # largest |p| seen, or held; 1 at first
    alpha = _base.Number(1)
    beta = _base.Number(2)
    eps = _base.Number(3)
    uniform = _base.Number(4)

    def ranges(self, geometry: Geometry) -> Ranges:
        on_host = isinstance(self.tree, OnHost)
        leaves: Any = _host_priorities.leaves if on_host else np.asarray
        yield "tree", leaves(self.tree), 0, MAX_LEAF if on_host else _base.LARGEST
        if self.low is not None:
            yield "low", self.low, 0, np.inf
        if self.top is not None:
            yield "top", self.top, -np.inf, _base.LARGEST
        yield "max_priority", np.asarray(self.numbers)[:1], 0, _base.LARGEST


class Queries(NamedTuple):
    """Hold the random numbers of a draw with replacement, for `draw_leaves`."""

    top: Array  # float32[B] or more, of `sum_tree.uniforms`
    bottom: Array
    order: Array | None  # int32[B]; None: as drawn


def queries(key: Array, batch_size: int, stratified: bool) -> Queries:
    """Return the random numbers of a draw; in random order, because strata are in slot order."""
    top, bottom = sum_tree.uniforms(key, batch_size, sum_tree.with_spare(batch_size), stratified=stratified)
    return Queries(top, bottom, random.permutation(key, batch_size) if stratified else None)


def draw_leaves(
    sampler: PrioritizedState, numbers: Queries, batch_size: int, capacity: int
) -> tuple[Array, Array, Array, Array]:
    """Draw leaves in proportion, bitwise equal on device and host; see `fbuf._algorithms.sum_tree.draw`.

    Returns:
      Slots int32[B], leaves float32[B], the sum of all leaves float32[], and the least leaf above 0, float32[]: infinite if
      there is none, 0 if it is not tracked.
    """
    top, bottom, order = numbers
    if isinstance(sampler.tree, OnHost):
        drawn = _host_priorities.draw(cast(Any, sampler.tree), top[:batch_size], bottom[:batch_size])
        slot, leaf, mass, least = drawn
    else:
        slot, leaf = sum_tree.descend(sampler.tree, top, bottom, batch_size, capacity)
        mass = sum_tree.root(sampler.tree)
        least = jnp.zeros((), jnp.float32) if sampler.low is None else sum_tree.root(sampler.low)
    if order is not None:
        slot, leaf = slot[order], leaf[order]
    return slot, leaf, mass, least


def leaf_of(sampler: PrioritizedState, priority: Array) -> Array:
    """Return (|p| + eps)^alpha, finite and >= 0 for any annealed numbers."""
    leaf = jnp.power(priority + jnp.maximum(sampler.eps, jnp.float32(0)), finite_exponent(sampler.alpha))
    return jnp.where(leaf >= jnp.float32(0), jnp.minimum(leaf, jnp.float32(MAX_LEAF)), jnp.float32(0))


def get_leaf(sampler: PrioritizedState, slot: Array) -> Array:
    """Return the leaves float32[...] in slots int32[...], each in [0, C)."""
    if isinstance(sampler.tree, OnHost):
        return _host_priorities.get(cast(Any, sampler.tree), slot)
    return sum_tree.get(sampler.tree, slot)


def write_leaves(
    sampler: PrioritizedState,
    slot: Array,
    leaf: Array,
    priority: Array,
    geometry: Geometry,
    token: Array,
    *,
    distinct: bool = False,
) -> PrioritizedState:
    """Write leaves and priorities [A] (-inf: not an anchor); slot C is skipped, the last of equal slots wins.

    `distinct`: as for `sum_tree.set_all`.
    """
    if isinstance(sampler.tree, OnHost):
        return dataclasses.replace(sampler, tree=_host_priorities.set(cast(Any, sampler.tree), slot, leaf, token))
    capacity, slot = geometry.capacity, slot + token
    trees, leaves, reduce = [sampler.tree], [leaf], list[sum_tree.Reduce](["sum"])
    if sampler.low is not None:
        trees.append(sampler.low)
        leaves.append(lowest(sampler, leaf, priority >= jnp.float32(0)))
        reduce.append("min")
    if sampler.top is not None:
        trees.append(sampler.top)
        leaves.append(priority)
        reduce.append("max")
    written = dict(
        zip(reduce, sum_tree.set_all(trees, slot, leaves, capacity, reduce=reduce, distinct=distinct), strict=True)
    )
    return dataclasses.replace(sampler, tree=written["sum"], low=written.get("min"), top=written.get("max"))


def seen(sampler: PrioritizedState, largest: Array | None, token: Array) -> PrioritizedState:
    """Update `max_priority` after a write whose largest priority is `largest` float32[]; None: it had none."""
    if sampler.top is None:
        return sampler if largest is None else _base.with_larger(sampler, largest)
    # Ordered, because a later write in the same step would otherwise copy the tree to keep its root.
    _, top = order_after_reads(token, sum_tree.root(sampler.top))
    return _base.with_numbers(sampler, max_priority=jnp.where(top >= jnp.float32(0), top, jnp.float32(1)))


def after(sampler: PrioritizedState, token: Array) -> Array:
    """Return the token, ordered after the read of `max_priority` from the tree of maxima.

    The added term is always 0, which XLA cannot know; it drops an `order_after_reads` whose result is unused.
    """
    return token if sampler.top is None else token + (sampler.max_priority < jnp.float32(0)).astype(jnp.int32)


def lowest(sampler: PrioritizedState, leaf: Array, is_anchor: Array) -> Array:
    """Return leaves for the tree of minima: infinite unless it can be drawn. Only uniform draws draw a leaf of 0."""
    has_weight = is_anchor if sampler.uniform is not None else is_anchor & (leaf > jnp.float32(0))
    return jnp.where(has_weight, leaf, jnp.float32(jnp.inf))


@component
class Prioritized(PrioritySampler):
    r"""Draw anchors with probability :math:`(|p| + \epsilon)^\alpha / \sum`.

    Attributes:
      alpha: 0 is uniform, 1 proportional. `buffer.set(state, alpha=...)` applies to priorities written later, and to all
        with `rebuild=True` (which needs largest="held").
      beta: Exponent of the importance weights; `sample(..., beta=...)` overrides it for one call.
      eps: Added to every magnitude, so that every anchor can be drawn.
      normalize: Divide weights by the largest in the "batch", the largest possible in the "buffer" (one more tree; as torchrl
        does), or not at all (None).
      stratified: Draw one row from each of B equal shares of the total, for less variance, or independently. Either way in
        random order, so that any part of a batch is a fair sample.
      replace: False: no row occurs twice in a batch. Each row is drawn in proportion to the priorities not drawn yet;
        `stratified` has no effect. If fewer than B are above 0, `mask` is False at the end. `probability` is then
        the probability of being in this batch given the other rows, over B. With beta=1 and normalize=None the mean over B
        of weight times f is an unbiased estimate of the mean of f (see `fbuf._algorithms.draw_without_replacement`).
      uniform: Share of the batch, 0 to 1, that is drawn uniformly: P = (1 - uniform) P' + uniform / n, with P' as above.
        None: 0, and `set` cannot change it; `sample(..., uniform=...)` overrides it for one call.
      largest: Priority of new rows without `extend(..., priority=...)`: the largest |p| "seen" so far, 1.0 at first, or the
        largest now "held" (1.0 if there is none, or all are 0), which stores the priorities in one more tree.
      on: Where priorities are stored: "device", with the rest of the state, or "host", in this process's memory behind
        callbacks. Draws are equal either way. On the host `replace`, `uniform` and `largest` keep their defaults.

    If every priority is 0, draws are uniform.

    With `on="host"` a state expires after 256 later writes, or fewer that changed an eighth of the priorities; drawing from it
    or writing to it raises "expired". `init` cannot be traced, and the state can neither be vmapped nor span devices.

    `stats`: `max_priority` (the largest seen, or held), `alpha`, `beta`.

    Cost: O(log C) a draw or update; about 4.6 bytes a row (as much again with normalize="buffer", and with largest="held";
    4 more with `uniform` if the view reads neighbours). On the host one callback each, and 5.2 bytes with
    normalize="buffer". replace=False: O(B log B log C) a batch.

    Sources: Schaul et al. 2016, sections 3.3 and 3.4; Kool et al. 2019 and Duffield et al. 2007 (replace=False).

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> sampler = fbuf.samplers.Prioritized(alpha=1.0, largest="held", replace=False, normalize=None)
      >>> buffer = fbuf.Buffer(capacity=100, sampler=sampler)
      >>> state = buffer.init(jnp.float32(0))
      >>> state = buffer.extend(state, jnp.arange(3.0), priority=jnp.array([1.0, 4.0, 9.0]))
      >>> state = buffer.set(state, alpha=0.5, rebuild=True)
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> sorted(batch.data[batch.mask].tolist())
      [0.0, 1.0, 2.0]
    """

    alpha: float = 0.6
    beta: float = 0.4
    eps: float = 1e-6
    normalize: Literal["batch", "buffer", None] = "batch"
    stratified: bool = True
    replace: bool = True
    uniform: float | None = None
    largest: Literal["seen", "held"] = "seen"
    on: Literal["device", "host"] = "device"

    moves = True
    annealed = ("alpha", "beta", "eps", "uniform")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replace", "uniform", "largest") if self.on == "host" else ():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default:
                raise ValueError(f'Prioritized: {name} is {value!r}; expected {default!r}, or on="device".')
        if self.uniform is not None and not self.replace:
            raise ValueError(f"Prioritized: uniform is {self.uniform!r}; expected None with replace=False.")

    @property
    def once(self) -> bool:
        return not self.replace

    @property
    def whole(self) -> str:
        if self.on_host:
            return "keeps priorities on the host; expected on='device'"
        return "" if self.uniform is None else "mixes two draws; expected uniform=None"

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
        return PrioritizedState(
            tree=_host_priorities.init() if self.on_host else sum_tree.init(capacity),
            low=sum_tree.init(capacity, jnp.inf) if self._least and not self.on_host else None,
            top=sum_tree.init(capacity, -jnp.inf) if self.largest == "held" else None,
            log=self._initial_queue(geometry, dense),
            numbers=self._initial_numbers(),
        )

    def change(
        self, sampler: PrioritizedState, change: AnchorChange, geometry: Geometry, token: Array
    ) -> PrioritizedState:
        token = after(sampler, token)
        distinct = _base.without_reopened(change, geometry.capacity) if geometry.streams else None
        slot, has_priority, largest = _base.written_slots(distinct or change, geometry.capacity)
        priority = jnp.where(has_priority, change.priority.reshape(-1), self.first_priority(sampler))
        closed = jnp.zeros((change.close_slot.size,), jnp.float32)
        leaf = jnp.concatenate([closed, leaf_of(sampler, priority)])
        stored = jnp.concatenate([jnp.full_like(closed, -jnp.inf), priority])
        sampler = write_leaves(sampler, slot, leaf, stored, geometry, token, distinct=distinct is not None)
        if sampler.log is not None:
            sampler = dataclasses.replace(sampler, log=anchor_log.apply(sampler.log, change, geometry, token))
        return seen(sampler, largest, token)

    def first_priority(self, sampler: PrioritizedState) -> Array:
        """Return the priority float32[] of rows without one."""
        first = sampler.max_priority
        if self.largest == "held":  # else new rows would never be drawn where all are 0
            first = jnp.where(first > jnp.float32(0), first, jnp.float32(1))
        return first

    def draw_some(
        self,
        sampler: PrioritizedState,
        key: Array,
        batch_size: int,
        wanted: Array,
        anchors: AnchorSet,
        options: Leaves,
        token: Array,
    ) -> tuple[PrioritizedState, Draw]:
        number = sum_of_lanes(anchors.counts).astype(jnp.float32)
        if self.replace:
            share = options.get("uniform", sampler.uniform)
            slot, mask, chance, least = with_replacement(
                sampler, key, batch_size, anchors, number, share, self.stratified
            )
            mask = mask & (lax.iota(np.int32, batch_size) < wanted)
        else:
            slot, mask, chance, least = without_replacement(sampler, key, batch_size, wanted, anchors, number)
        beta = options.get("beta", sampler.beta)
        weight = _base.importance_weights(number, chance, mask, beta, self.normalize, least)
        return sampler, _base.masked_draw(slot, chance, mask, anchors.geometry, weight)

    def update(
        self, sampler: PrioritizedState, slot: Array, error: Array, geometry: Geometry, token: Array
    ) -> PrioritizedState:
        token, priority = after(sampler, token), jnp.abs(error)
        largest = _base.largest_written(slot, priority, geometry.capacity)
        sampler = write_leaves(sampler, slot, leaf_of(sampler, priority), priority, geometry, token)
        return seen(sampler, largest, token)

    def leaves_in(self, sampler: PrioritizedState, slot: Array) -> tuple[Array, Array]:
        """Return the leaves and priorities float32[A] in slots int32[A], for `with_leaves`; of slot C some number."""
        leaf = get_leaf(sampler, slot)  # slot C is a parent, or padding
        return leaf, jnp.zeros_like(leaf) if sampler.top is None else sum_tree.get(sampler.top, slot)

    def with_leaves(
        self, sampler: PrioritizedState, slot: Array, leaves: tuple[Array, Array], geometry: Geometry, token: Array
    ) -> PrioritizedState:
        """Return a state with these leaves and priorities of anchors; slot C is skipped."""
        sampler = write_leaves(sampler, slot, *leaves, geometry, after(sampler, token))
        return sampler if sampler.top is None else seen(sampler, None, token)

    def rebuild(self, sampler: PrioritizedState, geometry: Geometry, token: Array) -> PrioritizedState:
        """Recompute all leaves from the stored priorities by the current numbers.

        It works in place, block by block; `sum_tree.rebuild` would need a second copy of the trees.
        """
        token, capacity, top = after(sampler, token), geometry.capacity, sampler.top
        assert top is not None
        block = min(BLOCK, capacity)

        def again(i: Array, trees: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
            tree, low = trees
            slot = jnp.minimum(i * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32), jnp.int32(capacity))
            priority = sum_tree.get(top, jnp.minimum(slot, jnp.int32(capacity - 1)))
            some = priority >= jnp.float32(0)
            leaf = jnp.where(some, leaf_of(sampler, jnp.where(some, priority, jnp.float32(0))), jnp.float32(0))
            tree = sum_tree.set(tree, slot + token, leaf, capacity)
            if low is not None:
                low = sum_tree.set(low, slot + token, lowest(sampler, leaf, some), capacity, reduce="min")
            return tree, low

        tree, low = control_flow.fori_loop(
            jnp.int32(0), jnp.int32(-(-capacity // block)), again, (sampler.tree, sampler.low)
        )
        return dataclasses.replace(sampler, tree=tree, low=low)

    def clear(self, sampler: PrioritizedState, geometry: Geometry, dense: bool) -> PrioritizedState:
        empty: PrioritizedState = super().clear(sampler, geometry, dense)
        return dataclasses.replace(empty, tree=_host_priorities.cleared(sampler.tree)) if self.on_host else empty

    def open(self, call: str, sampler: PrioritizedState, geometry: Geometry) -> PrioritizedState:
        return dataclasses.replace(sampler, tree=_host_priorities.open(call, geometry.capacity, self._least))

    def grown(
        self, sampler: PrioritizedState, fresh: PrioritizedState, geometry: Geometry, capacity: int
    ) -> PrioritizedState:
        number = geometry.capacity
        if self.on_host:
            leaves = _host_priorities.leaves(sampler.tree)
            tree = _host_priorities.open("Buffer.grow", number, self._least, leaves)
            return dataclasses.replace(sampler, tree=tree)

        def longer(nodes: Array, fill: float) -> Array:
            return lengthened(nodes[:capacity], jnp.full((number,), fill, jnp.float32))

        log = jax.tree.map(lengthened, sampler.log, fresh.log)
        return dataclasses.replace(_with_trees(sampler, longer), log=log)

    def moved(self, sampler: PrioritizedState, remap: SlotRemap) -> PrioritizedState:
        log = anchor_log.moved(sampler.log, remap)
        if self.on_host:
            leaves = remap.by_slot(_host_priorities.leaves(sampler.tree), 0)
            tree = _host_priorities.open("fbuf.load", remap.after.capacity, self._least, leaves)
            return dataclasses.replace(sampler, tree=tree, log=log)

        def remapped(nodes: Array, fill: float) -> Array:
            return jnp.asarray(remap.by_slot(np.asarray(nodes)[: remap.before.capacity], fill))

        return dataclasses.replace(_with_trees(sampler, remapped), log=log)

    def joined(self, parts: Sequence[PrioritizedState], fresh: PrioritizedState, join: SlotJoin) -> PrioritizedState:
        made: dict[str, Any] = {}
        for name, (_, fill, reduce) in _trees(parts[0]).items():
            leaves = join.slots([getattr(part, name) for part in parts], fill)
            made[name] = sum_tree.rebuild(jnp.asarray(leaves), reduce=reduce)
        return dataclasses.replace(parts[0], **made)

    def saved(self, sampler: PrioritizedState, capacity: int) -> PrioritizedState:
        # Parents equal the sums of their children bit for bit.
        if not self.on_host:
            kept: dict[str, Any] = {name: Prefix(nodes, capacity) for name, (nodes, *_) in _trees(sampler).items()}
            return dataclasses.replace(sampler, **kept)
        shapes = isinstance(sampler.tree.id, jax.ShapeDtypeStruct)
        of_shapes = jax.ShapeDtypeStruct((capacity,), jnp.float32)
        return dataclasses.replace(sampler, tree=of_shapes if shapes else _host_priorities.leaves(sampler.tree))

    def loaded(self, saved: PrioritizedState, capacity: int) -> PrioritizedState:
        if self.on_host:
            tree = _host_priorities.open("fbuf.load", capacity, self._least, np.asarray(saved.tree))
            return dataclasses.replace(saved, tree=tree)
        return _with_trees(saved, lambda leaves, fill: leaves)

    def plan_host(self, geometry: Geometry) -> int:
        return _host_priorities.most_bytes(geometry.capacity, self._least) if self.on_host else 0

    def host_bytes(self, sampler: PrioritizedState) -> int:
        return _host_priorities.store_of(sampler.tree).nbytes if self.on_host else 0

    def priority(self, sampler: PrioritizedState, slot: Array) -> Array:
        """Return |p| float32[...] in slots int32[...]: as stored with largest="held", else by the current alpha and eps.

        -1 if the current alpha is 0 and no priorities are stored, because all leaves are 1.
        """
        if sampler.top is not None:
            return sum_tree.get(sampler.top, slot)
        leaf = get_leaf(sampler, slot)
        alpha = finite_exponent(sampler.alpha)
        power = jnp.power(leaf, jnp.float32(1) / jnp.where(alpha > jnp.float32(0), alpha, jnp.float32(1)))
        known = jnp.maximum(power - jnp.maximum(sampler.eps, jnp.float32(0)), jnp.float32(0))
        return jnp.where(alpha > jnp.float32(0), known, jnp.float32(-1))

    def mass(self, sampler: PrioritizedState, anchors: AnchorSet) -> Mass:
        zero = jnp.zeros((), jnp.float32)
        return Mass(sum_tree.root(sampler.tree), zero, zero if sampler.low is None else sum_tree.root(sampler.low))

    def inspect(self, sampler: PrioritizedState, anchors: AnchorSet) -> Inspected:
        leaf = get_leaf(sampler, jnp.arange(anchors.geometry.capacity, dtype=jnp.int32))
        number = jnp.maximum(sum_of_lanes(anchors.counts), jnp.int32(1)).astype(jnp.float32)
        mass = jnp.sum(leaf) if self.on_host else sum_tree.root(sampler.tree)
        each = leaf / jnp.where(mass > jnp.float32(0), mass, jnp.float32(1))
        chance = jnp.where(mass > jnp.float32(0), each, jnp.float32(1) / number)
        return Inspected(_base.mixed_probability(chance, sampler.uniform, number))


def _trees(sampler: PrioritizedState) -> dict[str, tuple[Array, float, sum_tree.Reduce]]:
    """Return by name the trees that there are, the leaf of a slot without a row, and how leaves are reduced."""
    every = {
        "tree": (sampler.tree, 0.0, "sum"),
        "low": (sampler.low, jnp.inf, "min"),
        "top": (sampler.top, -jnp.inf, "max"),
    }
    return {name: found for name, found in every.items() if found[0] is not None}  # type: ignore[misc]


def _with_trees(sampler: PrioritizedState, leaves: Callable[[Array, float], Array]) -> PrioritizedState:
    """Return a state with trees over the `leaves` that are made of each tree."""
    made: dict[str, Any] = {
        n: sum_tree.rebuild(leaves(nodes, fill), reduce=how) for n, (nodes, fill, how) in _trees(sampler).items()
    }
    return dataclasses.replace(sampler, **made)


class PrioritizedDraw(NamedTuple):
    """Hold the drawn rows and their probabilities."""

    slot: Array  # int32[B]
    mask: Array  # bool[B]
    chance: Array  # float32[B]
    least: Array  # float32[], the smallest chance there is; for normalize="buffer"


def with_replacement(
    sampler: PrioritizedState,
    key: Array,
    batch_size: int,
    anchors: AnchorSet,
    number: Array,
    share: Array | None,
    stratified: bool,
) -> PrioritizedDraw:
    """Draw each row in proportion to its leaf; a `share` float32[] (or None) of them uniformly."""
    capacity = anchors.geometry.capacity
    some = jnp.broadcast_to(number > jnp.float32(0), (batch_size,))
    slot, leaf, mass, low = draw_leaves(sampler, queries(key, batch_size, stratified), batch_size, capacity)
    flat = mass <= jnp.float32(0)  # every leaf is 0: draw uniformly
    if share is not None:
        share = _base.clip_unit(share)
        slot = _base.mix_uniform(slot, key, share, anchors, sampler.log, some, stratified=stratified)
        leaf = sum_tree.get(sampler.tree, slot)

    own_key = fresh_key(key)  # `vmap` selects between keys

    def uniform_draw(slot: Array, leaf: Array) -> tuple[Array, Array]:
        slot = _base.draw_uniform(own_key(), anchors, sampler.log, some & flat)
        return slot, jnp.ones_like(leaf)

    slot, leaf = control_flow.replaced_if(flat, uniform_draw, slot, leaf, select=capacity <= MOST_COUNTED)
    mass = jnp.where(flat, jnp.maximum(number, jnp.float32(1)), mass)
    # The product is explicit: XLA would rewrite a quotient as one in some programs and not in others.
    chance, least = leaf * (jnp.float32(1) / mass), least_chance(leaf[0], mass, low, flat)
    if share is not None:
        chance = _base.mixed_probability(chance, share, number)
        least = _base.mixed_probability(least, share, number)
        # 0 if some leaf is 0 and `share` is 0: use the least in the batch.
        least = jnp.where(least > jnp.float32(0), least, jnp.min(chance))
    return PrioritizedDraw(slot, some, chance, least)


def least_chance(leaf: Array, mass: Array, low: Array, flat: Array | bool) -> Array:
    """Return the smallest probability there is; that of `leaf` float32[] if leaves are equal, or the least is unknown."""
    return jnp.where(flat | ~jnp.isfinite(low), leaf, low) / mass


def without_replacement(
    sampler: PrioritizedState, key: Array, batch_size: int, wanted: Array, anchors: AnchorSet, number: Array
) -> PrioritizedDraw:
    """Draw `wanted` int32[] rows one after another, each in proportion to the leaves that are left."""
    capacity, mass = anchors.geometry.capacity, sum_tree.root(sampler.tree)
    flat = mass <= jnp.float32(0)
    drawn = draw_without_replacement.draw(sampler.tree, key, batch_size, capacity, wanted)
    size = jnp.maximum(wanted, jnp.int32(1)).astype(jnp.float32)
    own_key = fresh_key(key)  # `vmap` selects between keys

    def uniform_draw(slot: Array, mask: Array, chance: Array) -> tuple[Array, Array, Array]:
        exists = lax.iota(np.int32, batch_size).astype(jnp.float32) < jnp.minimum(number, wanted.astype(jnp.float32))
        slot = _base.draw_uniform(own_key(), anchors, sampler.log, exists & flat, distinct=True)
        each = jnp.minimum(size / jnp.maximum(number, jnp.float32(1)), jnp.float32(1))
        return slot, exists, jnp.broadcast_to(each, chance.shape)

    values, select = (drawn.slot, drawn.mask, drawn.chance), capacity <= MOST_COUNTED
    slot, mask, chance = control_flow.replaced_if(flat, uniform_draw, *values, select=select)
    least = chance[0]
    if sampler.low is not None:
        low = sum_tree.root(sampler.low)
        of_low = draw_without_replacement.chance_of(low / jnp.where(flat, jnp.float32(1), mass), drawn.time)
        least = jnp.where(flat | ~jnp.isfinite(low), chance[0], of_low)
    return PrioritizedDraw(slot, mask, chance / size, least / size)
