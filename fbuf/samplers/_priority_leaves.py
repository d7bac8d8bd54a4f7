r"""Convert priorities to the leaves of `Prioritized`, and write and draw them.

A leaf is :math:`(|p| + \epsilon)^\alpha`, in a sum tree on the device or on the host (`fbuf.samplers._host_priorities`). On
request a tree of minima holds the leaves, for weights by the buffer, and a tree of maxima the priorities, for the largest one
held and for a new :math:`\alpha` for all.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from fbuf._algorithms import sum_tree
from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.geometry import Geometry
from fbuf._core.lazy_import import Later
from fbuf._core.ordering import order_after_reads
from fbuf._host import OnHost
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.importance import finite_exponent
from fbuf.samplers._base import Number, largest_written, with_numbers

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
    low: jax.Array | None  # float32[nodes], minima of the drawable leaves; with normalize="buffer", not on the host
    top: jax.Array | None  # float32[nodes], maxima of |p|, -inf where no anchor is; with largest="held"
    log: AnchorQueue | None  # the anchors; with uniform, unless every row is one
    numbers: jax.Array  # float32[4 or 5]

    max_priority = Number(0)  # largest |p| seen, or held; 1 at first
    alpha = Number(1)
    beta = Number(2)
    eps = Number(3)
    uniform = Number(4)


def init(capacity: int, least: bool, on_host: bool) -> tuple[Any, jax.Array | None]:
    """Return zero leaves as a tree of sums, and a tree of minima if the least leaf must be known."""
    if on_host:
        return _host_priorities.init(), None
    return sum_tree.init(capacity), sum_tree.init(capacity, jnp.inf) if least else None


def draw(
    sampler: PrioritizedState, key: jax.Array, batch_size: int, capacity: int, stratified: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draw leaves in proportion, bitwise equal on device and host; see `fbuf._algorithms.sum_tree.draw`.

    Returns:
      Slots int32[B], leaves float32[B], the sum of all leaves float32[], and the least leaf above 0, float32[]: infinite if
      there is none, 0 if it is not tracked.
    """
    if isinstance(sampler.tree, OnHost):
        return _host_priorities.draw(cast(Any, sampler.tree), key, batch_size, stratified)
    slot, leaf = sum_tree.draw(sampler.tree, key, batch_size, capacity, stratified=stratified)
    least = jnp.zeros((), jnp.float32) if sampler.low is None else sum_tree.root(sampler.low)
    return slot, leaf, sum_tree.root(sampler.tree), least


def leaf_of(sampler: PrioritizedState, priority: jax.Array) -> jax.Array:
    """Return (|p| + eps)^alpha, finite and >= 0 for any annealed numbers."""
    leaf = jnp.power(priority + jnp.maximum(sampler.eps, jnp.float32(0)), finite_exponent(sampler.alpha))
    return jnp.where(leaf >= jnp.float32(0), jnp.minimum(leaf, jnp.float32(MAX_LEAF)), jnp.float32(0))


def get(sampler: PrioritizedState, slot: jax.Array) -> jax.Array:
    """Return the leaves float32[...] in slots int32[...], each in [0, C)."""
    if isinstance(sampler.tree, OnHost):
        return _host_priorities.get(cast(Any, sampler.tree), slot)
    return sum_tree.get(sampler.tree, slot)


def priority_of(sampler: PrioritizedState, slot: jax.Array) -> jax.Array:
    """Return |p| float32[...] in slots int32[...]: as stored with largest="held", else by the current alpha and eps.

    -1 if the current alpha is 0 and no priorities are stored, because all leaves are 1.
    """
    if sampler.top is not None:
        return sum_tree.get(sampler.top, slot)
    leaf = get(sampler, slot)
    alpha = finite_exponent(sampler.alpha)
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
    """Write leaves and priorities [A] (-inf: not an anchor); slot C is skipped, the last of equal slots wins."""
    if isinstance(sampler.tree, OnHost):
        return dataclasses.replace(sampler, tree=_host_priorities.set(cast(Any, sampler.tree), slot, leaf, token))
    capacity, slot = geometry.capacity, slot + token
    trees, leaves, reduce = [sampler.tree], [leaf], list[sum_tree.Reduce](["sum"])
    if sampler.low is not None:
        trees.append(sampler.low)
        leaves.append(_lowest(sampler, leaf, priority >= jnp.float32(0)))
        reduce.append("min")
    if sampler.top is not None:
        trees.append(sampler.top)
        leaves.append(priority)
        reduce.append("max")
    written = dict(zip(reduce, sum_tree.set_all(trees, slot, leaves, capacity, reduce=reduce), strict=True))
    return dataclasses.replace(sampler, tree=written["sum"], low=written.get("min"), top=written.get("max"))


def seen(sampler: PrioritizedState, largest: jax.Array, token: jax.Array) -> PrioritizedState:
    """Update `max_priority` after a write whose largest priority is `largest` float32[]."""
    if sampler.top is None:
        return with_numbers(sampler, max_priority=jnp.maximum(sampler.max_priority, largest))
    # Ordered, because a later write in the same step would otherwise copy the tree to keep its root.
    _, held = order_after_reads(token, sum_tree.root(sampler.top))
    return with_numbers(sampler, max_priority=jnp.where(held >= jnp.float32(0), held, jnp.float32(1)))


def after(sampler: PrioritizedState, token: jax.Array) -> jax.Array:
    """Return the token, ordered after the read of `max_priority` from the tree of maxima.

    The added term is always 0, which XLA cannot know; it drops an `order_after_reads` whose result is unused.
    """
    return token if sampler.top is None else token + (sampler.max_priority < jnp.float32(0)).astype(jnp.int32)


def update(
    sampler: PrioritizedState, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array
) -> PrioritizedState:
    """Set the priorities of rows int32[B]; slot C is skipped."""
    token, priority = after(sampler, token), jnp.abs(error)
    largest = largest_written(slot, priority, geometry.capacity)
    sampler = write(sampler, slot, leaf_of(sampler, priority), priority, geometry, token)
    return seen(sampler, largest, token)


def rebuild(sampler: PrioritizedState, geometry: Geometry, token: jax.Array) -> PrioritizedState:
    """Recompute all leaves from the stored priorities by the current numbers.

    It works in place, block by block; `sum_tree.rebuild` would need a second copy of the trees.
    """
    token, capacity, held = after(sampler, token), geometry.capacity, sampler.top
    assert held is not None
    block = min(BLOCK, capacity)

    def again(i: jax.Array, trees: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        tree, low = trees
        slot = jnp.minimum(i * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32), jnp.int32(capacity))
        priority = sum_tree.get(held, jnp.minimum(slot, jnp.int32(capacity - 1)))
        some = priority >= jnp.float32(0)
        leaf = jnp.where(some, leaf_of(sampler, jnp.where(some, priority, jnp.float32(0))), jnp.float32(0))
        tree = sum_tree.set(tree, slot + token, leaf, capacity)
        if low is not None:
            low = sum_tree.set(low, slot + token, _lowest(sampler, leaf, some), capacity, reduce="min")
        return tree, low

    tree, low = control_flow.fori_loop(
        jnp.int32(0), jnp.int32(-(-capacity // block)), again, (sampler.tree, sampler.low)
    )
    return dataclasses.replace(sampler, tree=tree, low=low)


def _lowest(sampler: PrioritizedState, leaf: jax.Array, is_anchor: jax.Array) -> jax.Array:
    """Return leaves for the tree of minima: infinite unless drawable. A leaf of 0 is drawable by uniform draws only."""
    drawable = is_anchor if sampler.uniform is not None else is_anchor & (leaf > jnp.float32(0))
    return jnp.where(drawable, leaf, jnp.float32(jnp.inf))
