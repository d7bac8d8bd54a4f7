r"""The leaves of `Prioritized`: how priorities become leaves, and how these are written and drawn.

They are stored on the device or, for the plain options, on the host (`fbuf.samplers._host_priorities`).

A leaf is :math:`(|p| + \epsilon)^\alpha`, in a sum tree. Where they are asked for, a tree of minima holds the leaves (weights
by the buffer), and a tree of maxima the priorities (the largest now held; a new :math:`\alpha` for all).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import sum_tree
from fbuf._core.component import state
from fbuf._core.geometry import Geometry
from fbuf._core.lazy_import import Later
from fbuf._core.ordering import order_after_reads
from fbuf._host import OnHost
from fbuf._indexing.anchor_log import Log
from fbuf._indexing.importance import exponent
from fbuf.samplers._types import Drawn

if TYPE_CHECKING:
    from fbuf.samplers import _host_priorities
else:
    _host_priorities = Later("fbuf.samplers._host_priorities")

LARGEST = 2.0**96  # 2^30 of them still have a finite float32 sum, and that an inverse that is no subnormal
BLOCK = 1024  # leaves that `rebuild` computes at once


@state
class PrioritizedState:
    """Leaves, and the numbers a user may anneal without compiling again (`buffer.set`). None where not asked for."""

    tree: Any  # float32[nodes], sums; on the host a `HostTree`
    low: Any  # float32[nodes], minima of the leaves that can be drawn; [0] unless normalize="buffer", () on the host
    top: jax.Array | None  # float32[nodes], maxima of |p|, -inf where no anchor is; with largest="held"
    max_priority: jax.Array  # float32[], largest |p| seen, or held; 1 at first
    log: Log | None  # the anchors in order; with uniform, where not every row is one
    alpha: jax.Array  # float32[]
    beta: jax.Array  # float32[]
    eps: jax.Array  # float32[]
    uniform: jax.Array | None  # float32[]


def init(capacity: int, least: bool, on_host: bool) -> tuple[Any, Any]:
    """Leaves that are 0, as a tree of sums and one of minima, if the least of them must be known."""
    if on_host:
        return _host_priorities.init(), ()
    return sum_tree.init(capacity), sum_tree.init(capacity, jnp.inf) if least else jnp.zeros((0,), jnp.float32)


def draw(sampler: PrioritizedState, key: jax.Array, batch_size: int, capacity: int, stratified: bool) -> Drawn:
    """Leaves in proportion, the same wherever they lie, bit for bit; see `fbuf._algorithms.sum_tree.draw`."""
    if isinstance(sampler.tree, OnHost):
        return _host_priorities.draw(cast(Any, sampler.tree), key, batch_size, stratified)
    slot, leaf = sum_tree.draw(sampler.tree, key, batch_size, capacity, stratified=stratified)
    least = sum_tree.root(sampler.low) if sampler.low.shape[0] else jnp.zeros((), jnp.float32)
    return Drawn(slot, leaf, sum_tree.root(sampler.tree), least)


def leaf_of(sampler: PrioritizedState, priority: jax.Array) -> jax.Array:
    """(|p| + eps)^alpha, finite and >= 0 whatever numbers were annealed to."""
    leaf = jnp.power(priority + jnp.maximum(sampler.eps, jnp.float32(0)), exponent(sampler.alpha))
    return jnp.where(leaf >= jnp.float32(0), jnp.minimum(leaf, jnp.float32(LARGEST)), jnp.float32(0))


def priority_of(sampler: PrioritizedState, leaf: jax.Array) -> jax.Array:
    """float32[C], |p| of leaves float32[C]: as stored with largest="held", else by the alpha and eps of now.

    -1 where the alpha of now is 0 and nothing is kept: all leaves are 1 then.
    """
    if sampler.top is not None:
        return sampler.top[: leaf.shape[0]]
    alpha = exponent(sampler.alpha)
    power = jnp.power(leaf, jnp.float32(1) / jnp.where(alpha > jnp.float32(0), alpha, jnp.float32(1)))
    known = jnp.maximum(power - jnp.maximum(sampler.eps, jnp.float32(0)), jnp.float32(0))
    return jnp.where(alpha > jnp.float32(0), known, jnp.float32(-1))


def write(
    sampler: PrioritizedState,
    slot: jax.Array,
    leaf: jax.Array,
    priority: jax.Array,
    geometry: Geometry,
    token: jax.Array,
) -> PrioritizedState:
    """Write leaves and priorities [A] (-inf: not an anchor); slot C is skipped, the last of equal ones wins."""
    if isinstance(sampler.tree, OnHost):
        return dataclasses.replace(sampler, tree=_host_priorities.set(cast(Any, sampler.tree), slot, leaf, token))
    capacity, slot = geometry.capacity, slot + token
    trees, leaves, reduce = [sampler.tree], [leaf], list[sum_tree.Reduce](["sum"])
    if sampler.low.shape[0]:
        trees.append(sampler.low)
        leaves.append(_lowest(sampler, leaf, priority >= jnp.float32(0)))
        reduce.append("min")
    if sampler.top is not None:
        trees.append(sampler.top)
        leaves.append(priority)
        reduce.append("max")
    written = dict(zip(reduce, sum_tree.set_all(trees, slot, leaves, capacity, reduce=reduce), strict=True))
    return dataclasses.replace(
        sampler, tree=written["sum"], low=written.get("min", sampler.low), top=written.get("max")
    )


def seen(sampler: PrioritizedState, largest: jax.Array, token: jax.Array) -> PrioritizedState:
    """After a write of priorities of which `largest` float32[] is one."""
    if sampler.top is None:
        return dataclasses.replace(sampler, max_priority=jnp.maximum(sampler.max_priority, largest))
    # Pinned: else a later write in the same step would copy the tree, to look at its root again.
    _, held = order_after_reads(token, sum_tree.root(sampler.top))
    return dataclasses.replace(sampler, max_priority=jnp.where(held >= jnp.float32(0), held, jnp.float32(1)))


def after(sampler: PrioritizedState, token: jax.Array) -> jax.Array:
    """The token, so that what writes with it comes after `max_priority` was read from the tree of maxima.

    It is never negative, which XLA cannot know. A `order_after_reads` whose reads nobody uses would be dropped.
    """
    return token if sampler.top is None else token + (sampler.max_priority < jnp.float32(0)).astype(jnp.int32)


def update(
    sampler: PrioritizedState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
) -> PrioritizedState:
    """Set the priorities of rows int32[B]; slot C is skipped."""
    token, priority = after(sampler, token), jnp.abs(error)
    largest = jnp.max(jnp.where(slot < jnp.int32(geometry.capacity), priority, jnp.float32(0)), initial=0.0)
    sampler = write(sampler, slot, leaf_of(sampler, priority), priority, geometry, token)
    return seen(sampler, largest, token)


def rebuild(sampler: PrioritizedState, geometry: Geometry, token: jax.Array) -> PrioritizedState:
    """Compute all leaves again from the priorities stored, by the numbers of now.

    In place, block after block: `_sumtree.rebuild` would be faster, but hold the trees twice.
    """
    token, capacity, held = after(sampler, token), geometry.capacity, sampler.top
    assert held is not None
    block = min(BLOCK, capacity)

    def again(i: jax.Array, trees: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tree, low = trees
        slot = jnp.minimum(i * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32), jnp.int32(capacity))
        priority = sum_tree.get(held, jnp.minimum(slot, jnp.int32(capacity - 1)))
        some = priority >= jnp.float32(0)
        leaf = jnp.where(some, leaf_of(sampler, jnp.where(some, priority, jnp.float32(0))), jnp.float32(0))
        tree = sum_tree.set(tree, slot + token, leaf, capacity)
        if low.shape[0]:
            low = sum_tree.set(low, slot + token, _lowest(sampler, leaf, some), capacity, reduce="min")
        return tree, low

    tree, low = lax.fori_loop(jnp.int32(0), jnp.int32(-(-capacity // block)), again, (sampler.tree, sampler.low))
    return dataclasses.replace(sampler, tree=tree, low=low)


def _lowest(sampler: PrioritizedState, leaf: jax.Array, is_anchor: jax.Array) -> jax.Array:
    """Leaves for the tree of minima: those that can be drawn; a leaf of 0 only by draws that ignore leaves."""
    drawable = is_anchor if sampler.uniform is not None else is_anchor & (leaf > jnp.float32(0))
    return jnp.where(drawable, leaf, jnp.float32(jnp.inf))
