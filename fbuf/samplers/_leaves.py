r"""The leaves of `Prioritized`: how priorities become leaves, and what happens to those of other rows when some change.

They lie on the device or, plain ones, on the host (`fbuf.samplers._hosttree`).

A leaf is :math:`(|p| + \epsilon)^\alpha`, in a sum tree, and where they are asked for in a tree of minima (weights by the
buffer) and beside it the priorities themselves in a tree of maxima (the largest now held; a new :math:`\alpha` for all).

A priority that *decays* loses a factor with every update, and so does every other: only the ratio to those written since
changes. So leaves are kept in units of a number that shrinks, and none is touched, until after 30 halvings or more the
number is brought back by a power of two, which changes no ratio (`fbuf._sweep`). Multiplying all of them each time was
rejected (O(C)), and so was growing new ones without end (a float32 runs out).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from fbuf import _descent, _sumtree, _sweep
from fbuf._config import state
from fbuf._host import OnHost
from fbuf._later import Later
from fbuf._pin import pin
from fbuf._population import Log
from fbuf._typing import Geometry
from fbuf._weights import exponent, unit
from fbuf.samplers import _by_priority

if TYPE_CHECKING:
    from fbuf.samplers import _hosttree
else:
    _hosttree = Later("fbuf.samplers._hosttree")

LARGEST = 2.0**96  # 2^30 of them still have a finite float32 sum, and that an inverse that is no subnormal
LEAST = 2.0**-100  # of a leaf that has decayed: it can still be drawn
_LEAST_PRIORITY = 2.0**-96  # likewise; times the smallest unit it is no subnormal yet
_SMALLEST_UNIT = 2.0**-30
LEAST_DECAY = 0.001  # in one update


class Drawn(NamedTuple):
    """Leaves drawn, and what their weights are reckoned by."""

    slot: jax.Array  # int32[B]
    leaf: jax.Array  # float32[B]
    mass: jax.Array  # float32[], sum of all leaves
    least: jax.Array  # float32[], the least leaf above 0; infinite if there is none, 0 if nobody asked


@state
class PrioritizedState:
    """Leaves, and the numbers a user may anneal without compiling again (`buffer.set`). None where not asked for."""

    tree: Any  # float32[nodes], sums; on the host a `HostTree`
    low: Any  # float32[nodes], minima of the leaves that can be drawn; [0] unless normalize="buffer", () on the host
    top: jax.Array | None  # float32[nodes], maxima of |p|, -inf where no anchor is; with largest="held"
    max_priority: jax.Array  # float32[], largest |p| seen, or held; 1 at first
    unit: jax.Array | None  # float32[2], what leaves and priorities are kept in; with decay
    log: Log | None  # the anchors in order; with uniform, where not every row is one
    alpha: jax.Array  # float32[]
    beta: jax.Array  # float32[]
    eps: jax.Array  # float32[]
    uniform: jax.Array | None  # float32[]
    decay: jax.Array | None  # float32[]
    keep: jax.Array | None  # float32[]
    rho: jax.Array | None  # float32[]; with spread


def init(capacity: int, least: bool, on_host: bool) -> tuple[Any, Any]:
    """Leaves that are 0, as a tree of sums and one of minima, if the least of them must be known."""
    if on_host:
        return _hosttree.init(), ()
    return _sumtree.init(capacity), _sumtree.init(capacity, jnp.inf) if least else jnp.zeros((0,), jnp.float32)


def draw(sampler: PrioritizedState, key: jax.Array, batch_size: int, capacity: int, stratified: bool) -> Drawn:
    """Leaves in proportion, the same wherever they lie, bit for bit; see `fbuf._descent.draw`."""
    if isinstance(sampler.tree, OnHost):
        return _hosttree.draw(cast(Any, sampler.tree), key, batch_size, stratified)
    slot, leaf = _descent.draw(sampler.tree, key, batch_size, capacity, stratified=stratified)
    least = _sumtree.root(sampler.low) if sampler.low.shape[0] else jnp.zeros((), jnp.float32)
    return Drawn(slot, leaf, _sumtree.root(sampler.tree), least)


def leaf_of(sampler: PrioritizedState, priority: jax.Array) -> jax.Array:
    """(|p| + eps)^alpha as it is kept, finite and >= 0 whatever numbers were annealed to."""
    leaf = jnp.power(priority + jnp.maximum(sampler.eps, jnp.float32(0)), exponent(sampler.alpha))
    leaf = leaf if sampler.unit is None else leaf / sampler.unit[0]
    return jnp.where(leaf >= jnp.float32(0), jnp.minimum(leaf, jnp.float32(LARGEST)), jnp.float32(0))


def priority_of(sampler: PrioritizedState, leaf: jax.Array) -> jax.Array:
    """float32[C], |p| of leaves float32[C]: as they are kept with largest="held", else by the alpha and eps of now.

    -1 where the alpha of now is 0 and nothing is kept: all leaves are 1 then.
    """
    if sampler.top is not None:
        held = sampler.top[: leaf.shape[0]]
        return held if sampler.unit is None else held * sampler.unit[1]
    alpha = exponent(sampler.alpha)
    whole = leaf if sampler.unit is None else leaf * sampler.unit[0]
    power = jnp.power(whole, jnp.float32(1) / jnp.where(alpha > jnp.float32(0), alpha, jnp.float32(1)))
    known = jnp.maximum(power - jnp.maximum(sampler.eps, jnp.float32(0)), jnp.float32(0))
    return jnp.where(alpha > jnp.float32(0), known, jnp.float32(-1))


def kept(sampler: PrioritizedState, priority: jax.Array) -> jax.Array:
    """A priority as it is kept."""
    return priority if sampler.unit is None else jnp.minimum(priority / sampler.unit[1], jnp.float32(3e38))


def write(
    sampler: PrioritizedState,
    slot: jax.Array,
    leaf: jax.Array,
    priority: jax.Array,
    geometry: Geometry,
    token: jax.Array,
) -> PrioritizedState:
    """Writes leaves and priorities [A] (-inf: no anchor) as they are kept; slot C is skipped, the last of equal ones wins."""
    if isinstance(sampler.tree, OnHost):
        return dataclasses.replace(sampler, tree=_hosttree.set(cast(Any, sampler.tree), slot, leaf, token))
    capacity, slot = geometry.capacity, slot + token
    trees, leaves, reduce = [sampler.tree], [leaf], list[_sumtree.Reduce](["sum"])
    if sampler.low.shape[0]:
        trees.append(sampler.low)
        leaves.append(_lowest(sampler, leaf, priority >= jnp.float32(0)))
        reduce.append("min")
    if sampler.top is not None:
        trees.append(sampler.top)
        leaves.append(priority)
        reduce.append("max")
    written = dict(zip(reduce, _sumtree.set_all(trees, slot, leaves, capacity, reduce=reduce), strict=True))
    return dataclasses.replace(
        sampler, tree=written["sum"], low=written.get("min", sampler.low), top=written.get("max")
    )


def seen(sampler: PrioritizedState, largest: jax.Array, token: jax.Array) -> PrioritizedState:
    """After a write of priorities of which `largest` float32[] is one."""
    if sampler.top is None:
        return dataclasses.replace(sampler, max_priority=jnp.maximum(sampler.max_priority, largest))
    # Pinned: else a later write in the same step would copy the tree, to look at its root again.
    _, held = pin(token, _sumtree.root(sampler.top))
    held = held if sampler.unit is None else held * sampler.unit[1]
    return dataclasses.replace(sampler, max_priority=jnp.where(held >= jnp.float32(0), held, jnp.float32(1)))


def after(sampler: PrioritizedState, token: jax.Array) -> jax.Array:
    """The token, so that what writes with it comes after `max_priority` was read from the tree of maxima.

    It is never negative, which XLA cannot know. A `pin` whose reads nobody uses would be dropped.
    """
    return token if sampler.top is None else token + (sampler.max_priority < jnp.float32(0)).astype(jnp.int32)


def update(
    sampler: PrioritizedState,
    slot: jax.Array,
    error: jax.Array,
    before: jax.Array,
    geometry: Geometry,
    token: jax.Array,
) -> PrioritizedState:
    """New priorities of rows int32[B], and what these do to those `before` them int32[B, W]; slot C is skipped."""
    token = after(sampler, token)
    capacity = jnp.int32(geometry.capacity)
    if sampler.decay is not None:
        sampler = _decayed(sampler, geometry, token)
    priority, there = jnp.abs(error), slot < capacity
    leaf, stored = leaf_of(sampler, priority), kept(sampler, priority)
    largest = jnp.max(jnp.where(there, priority, jnp.float32(0)), initial=0.0)
    if sampler.keep is not None:
        share, at = unit(sampler.keep), jnp.where(there, slot, jnp.int32(0))
        old = _sumtree.get(sampler.tree, at)
        held = stored if sampler.top is None else _sumtree.get(sampler.top, at)
        token, (old, held) = pin(token, (old, held))
        leaf = jnp.maximum(leaf, jnp.power(share, exponent(sampler.alpha)) * old)
        stored = jnp.maximum(stored, jnp.where(held >= jnp.float32(0), held, jnp.float32(0)) * share)
    sampler = write(sampler, slot, leaf, stored, geometry, token)
    if before.shape[1]:
        sampler = _raised(sampler, slot, before, geometry, token)
    return seen(sampler, largest, token)


def _raised(
    sampler: PrioritizedState, slot: jax.Array, before: jax.Array, geometry: Geometry, token: jax.Array
) -> PrioritizedState:
    """Rows before others have at least `rho^k` of their priorities, k rows before."""
    assert sampler.rho is not None
    capacity, fall = geometry.capacity, _by_priority.fall(sampler.rho, before.shape[1])
    tree, low, top = sampler.tree, sampler.low, sampler.top
    tree, token = _at_least(tree, slot, before, jnp.power(fall, exponent(sampler.alpha)), capacity, token, "sum")
    if low.shape[0]:
        flat = before.reshape(-1)
        inside = jnp.minimum(flat, jnp.int32(capacity - 1))
        token, leaf = pin(token, _sumtree.get(tree, inside))
        low = _sumtree.set(low, flat + token, _lowest(sampler, leaf), capacity, reduce="min")
    if top is not None:
        top, token = _at_least(top, slot, before, fall, capacity, token, "max")
    return dataclasses.replace(sampler, tree=tree, low=low, top=top)


def _at_least(
    tree: jax.Array,
    slot: jax.Array,
    before: jax.Array,
    factor: jax.Array,
    capacity: int,
    token: jax.Array,
    reduce: _sumtree.Reduce,
) -> tuple[jax.Array, jax.Array]:
    """Leaves `before` int32[B, W] are no less than `factor` float32[W] of those at `slot` int32[B]; and the token."""
    last = jnp.int32(capacity - 1)
    own = _sumtree.get(tree, jnp.minimum(slot, last))
    theirs = _sumtree.get(tree, jnp.minimum(before, last))
    token, (own, theirs) = pin(token, (own, theirs))
    least = jnp.maximum(theirs, jnp.maximum(own, jnp.float32(0))[:, None] * factor[None, :])
    # Of several for one row the largest counts: it comes last.
    where, leaf = lax.sort((before.reshape(-1), least.reshape(-1)), num_keys=2)
    return _sumtree.set(tree, where + token, leaf, capacity, reduce=reduce), token


def _decayed(sampler: PrioritizedState, geometry: Geometry, token: jax.Array) -> PrioritizedState:
    """Every priority times `decay`: the unit is, unless it gets too small."""
    assert sampler.decay is not None and sampler.unit is not None
    given = jnp.where(sampler.decay >= jnp.float32(0), sampler.decay, jnp.float32(1))  # NaN as well
    decay = jnp.clip(given, jnp.float32(LEAST_DECAY), jnp.float32(1))
    by_leaf = jnp.maximum(jnp.power(decay, exponent(sampler.alpha)), jnp.float32(2.0**-40))
    smaller = sampler.unit * jnp.stack([by_leaf, decay])
    due = jnp.any(smaller < jnp.float32(_SMALLEST_UNIT))
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(smaller, jnp.int32) & jnp.int32(0x7F800000), jnp.float32)
    power = jnp.where(due, power, jnp.float32(1))
    capacity = geometry.capacity

    def rescale(trees: tuple[jax.Array, ...], slot: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
        tree, low, *top = trees
        leaf = _sumtree.get(tree, at)
        leaf = jnp.where(due & (leaf > jnp.float32(0)), jnp.maximum(leaf * power[0], jnp.float32(LEAST)), leaf)
        slot = slot + token
        tree = _sumtree.set(tree, slot, leaf, capacity)
        if low.shape[0]:
            is_anchor = jnp.isfinite(_sumtree.get(low, at))
            low = _sumtree.set(low, slot, _lowest(sampler, leaf, is_anchor), capacity, reduce="min")
        if top:
            held = _sumtree.get(top[0], at)
            least = jnp.where(due & (held > jnp.float32(0)), jnp.float32(_LEAST_PRIORITY), jnp.float32(-jnp.inf))
            top = [_sumtree.set(top[0], slot, jnp.maximum(held * power[1], least), capacity, reduce="max")]
        return (tree, low, *top)

    trees = (sampler.tree, sampler.low, *(() if sampler.top is None else (sampler.top,)))
    tree, low, *top = _sweep.every_leaf(trees, rescale, capacity, due)
    return dataclasses.replace(
        sampler,
        tree=tree,
        low=low,
        top=top[0] if top else None,
        unit=smaller / power,
        max_priority=jnp.maximum(sampler.max_priority * decay, jnp.float32(_LEAST_PRIORITY)),
    )


def rebuild(sampler: PrioritizedState, geometry: Geometry, token: jax.Array) -> PrioritizedState:
    """Leaves of all priorities kept, by the numbers of now."""
    token, capacity, held = after(sampler, token), geometry.capacity, sampler.top
    assert held is not None

    def again(trees: tuple[jax.Array, jax.Array], slot: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        tree, low = trees
        stored = _sumtree.get(held, at)
        priority = stored if sampler.unit is None else stored * sampler.unit[1]
        some = priority >= jnp.float32(0)
        leaf = jnp.where(some, leaf_of(sampler, jnp.where(some, priority, jnp.float32(0))), jnp.float32(0))
        tree = _sumtree.set(tree, slot + token, leaf, capacity)
        if low.shape[0]:
            low = _sumtree.set(low, slot + token, _lowest(sampler, leaf, some), capacity, reduce="min")
        return tree, low

    tree, low = _sweep.every_leaf((sampler.tree, sampler.low), again, capacity, jnp.ones((), bool))
    return dataclasses.replace(sampler, tree=tree, low=low)


def _lowest(sampler: PrioritizedState, leaf: jax.Array, is_anchor: jax.Array | None = None) -> jax.Array:
    """Leaves for the tree of minima: of what can be drawn; a leaf of 0 only by those draws that ignore leaves."""
    drawable = leaf > jnp.float32(0) if sampler.uniform is None else jnp.ones(leaf.shape, bool)
    drawable = drawable if is_anchor is None else drawable & is_anchor
    return jnp.where(drawable, leaf, jnp.float32(jnp.inf))
