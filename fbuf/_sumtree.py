"""Functional sum, min or max tree over `C` leaves: one float32 array, fan-out 8, no drift.

Layout: leaves first (leaf `i` is element `i`), then each level of parents, the root last. Every
level is padded to a multiple of 8 with the reduction's identity, so eight siblings never straddle a
cache line and the array holds about `8 C / 7` elements at any capacity (a heap rounded up to a power
of 8 would hold up to 2.1 C).

Why this way:
  * A parent is *recomputed* from its children, always in the same order of additions, so it equals
    their sum bit for bit whatever the history. Adding differences (flashbax) drifts: 4% off
    at the root of a million leaves after 40,000 updates, and zero leaves get drawn.
  * `set` recomputes node by node only the levels that hold more nodes than the batch touches, and
    the levels above in one dense sweep: for a million leaves and 256 indices 3 levels of 7.
  * Drawing takes two uniforms per query, the second one from a middle level on. One float32 uniform
    has 2^24 values; over a million leaves it fails a chi-square test at 25 million draws. A fresh one
    at every level is as good, costs more bits, and leaves nothing of the strata.
  * On CPU each level is a loop over the queries, which XLA compiles into one kernel and the processor
    overlaps. Gathering a level for all queries at once took 1.4 to 5 times as long there (XLA splits
    the tiny loops over threads), one query after the other 1.4 to 2 times; fan-outs of 64 and more and
    a `cumsum` over the leaves also lost. Other platforms gather by level, which was never timed there.
    `lax.platform_dependent` picks at lowering; both paths do the same arithmetic in the same order.
Source: Schaul et al. 2016, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._duplicates import keep_last

__all__ = ["draw", "get", "init", "layout", "nodes", "rebuild", "root", "set", "uniforms"]

Reduce = Literal["sum", "min", "max"]

_FAN_OUT = 8
_MAX_CAPACITY = 2**30  # 8 C / 7 nodes must fit the int32 that indexes them
_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "min": lax.min,
    "max": lax.max,
}
_IDENTITY = {"sum": 0.0, "min": np.inf, "max": -np.inf}


@functools.lru_cache(maxsize=256)
def _layout(capacity: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (nodes of each level, offset of each level, then the total); leaves are level 0."""
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ValueError(
            f"sumtree: capacity is {capacity}; expected 1 to 2**30. Use several buffers, or a smaller capacity=."
        )
    counts = [capacity]
    while counts[-1] > 1 or len(counts) == 1:
        counts.append(-(-counts[-1] // _FAN_OUT))
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // _FAN_OUT) * _FAN_OUT)
    return tuple(counts), tuple(offsets)


def nodes(capacity: int) -> int:
    """Returns the number of float32 elements of a tree, about `8 * capacity / 7`."""
    return _layout(capacity)[1][-1]


def init(capacity: int, fill: float = 0.0) -> jax.Array:
    """Makes a tree with every leaf, and so every parent, at the identity of its reduction.

    Args:
      capacity: `C >= 1`, static; the leaves are `[0, C)`.
      fill: 0 for a sum, `inf` for a min, `-inf` (or 0, for leaves >= 0) for a max.
    Returns:
      float32[nodes(capacity)].
    Raises:
      ValueError: any other `fill` (use `rebuild`), or a capacity outside `[1, 2**30]`.
    """
    if fill not in (0.0, np.inf, -np.inf):
        raise ValueError(
            f"sumtree.init: fill is {fill}; expected 0, inf or -inf. "
            f"Use rebuild(jnp.full(capacity, {fill}, jnp.float32))."
        )
    return jnp.full((nodes(capacity),), fill, jnp.float32)


def get(tree: jax.Array, index: jax.Array, capacity: int) -> jax.Array:
    """Reads leaves.

    Args:
      tree: float32[nodes(capacity)].
      index: int32[...], each in `[0, capacity)` (not checked).
      capacity: `C`, static.
    Returns:
      float32[...] of the shape of `index`.
    """
    del capacity  # leaves come first; other layouts would need it
    return tree.at[index].get(mode="promise_in_bounds")


def root(tree: jax.Array) -> jax.Array:
    """Returns the sum (min, max) of all leaves, float32[]; it is the first of the last eight."""
    return tree[tree.shape[0] - _FAN_OUT]


def rebuild(leaves: jax.Array, *, reduce: Reduce = "sum") -> jax.Array:
    """Makes a tree from all its leaves, one vectorized sweep.

    Args:
      leaves: float32[C].
      reduce: what parents hold of their children.
    Returns:
      float32[nodes(C)], bitwise what `set` of every leaf gives.
    Cost: O(C).
    """
    leaves = lax.stop_gradient(leaves)
    capacity = leaves.shape[0]
    levels = _levels_above(_pad(leaves, reduce), capacity, 1, reduce)
    return jnp.concatenate([_pad(leaves, reduce), *levels])


def set(
    tree: jax.Array,
    index: jax.Array,
    leaf: jax.Array,
    capacity: int,
    *,
    reduce: Reduce = "sum",
) -> jax.Array:
    """Writes leaves and recomputes the parents above them.

    Args:
      tree: float32[nodes(capacity)]; written in place when donated or carried by a scan.
      index: int32[B]. One outside `[0, capacity)` is dropped; of equal ones the last wins.
      leaf: float32[B], finite, and >= 0 with a finite total for a tree that is drawn from.
      capacity: `C`, static.
      reduce: what parents hold of their children; the same at every call on one tree.
    Returns:
      The new tree; every parent equals the reduction of its children, bit for bit.
    Cost: O(B log C); no more than O(B + C / 7) for large B.
    """
    if index.shape[0] == 0:
        return tree
    tree, leaf = lax.stop_gradient((tree, leaf))
    keep = (index >= 0) & (index < capacity)
    # XLA turns a scatter of one element into an update that it does not do in place (jax 0.10.2).
    elsewhere = _set_by_level if index.shape[0] > 1 else _set_by_loop
    tree = lax.platform_dependent(
        tree,
        index,
        leaf,
        keep,
        cpu=functools.partial(_set_by_loop, capacity=capacity, reduce=reduce),
        default=functools.partial(elsewhere, capacity=capacity, reduce=reduce),
    )
    # The few levels left are cheaper swept whole, and lie side by side at the end of the array.
    _, offsets = _layout(capacity)
    first = _first_dense(capacity, index.shape[0])
    below = lax.slice(tree, (offsets[first - 1],), (offsets[first],))
    above = jnp.concatenate(_levels_above(below, capacity, first, reduce))
    return lax.dynamic_update_slice(tree, above, (np.int32(offsets[first]),))


def draw(
    tree: jax.Array, key: jax.Array, batch_size: int, capacity: int, *, stratified: bool
) -> tuple[jax.Array, jax.Array]:
    r"""Draws leaves with probability :math:`P(i) = leaf_i / \sum_k leaf_k`, with replacement.

    Args:
      tree: float32[nodes(capacity)], a sum tree whose leaves are finite and >= 0.
      key: PRNG key, typed or raw; consumed.
      batch_size: `B`, static.
      capacity: `C`, static.
      stratified: draw one leaf from each of `B` equal shares of the total, in order (less variance),
        instead of `B` independent ones. Above 512 leaves the shares are kept apart down to blocks of
        neighbors (65 blocks of 513 leaves, 1,954 of a million), and draws within a block are independent.
    Returns:
      index: int32[B] in `[0, capacity)`; never a zero leaf while the root is above zero, and 0
        everywhere when it is zero (the caller decides what that means).
      leaf: float32[B], the leaves at `index`.
    Cost: O(B log C).
    Source: Schaul et al. 2016, appendix B.2.1 (stratified).
    """
    tree = lax.stop_gradient(tree)
    top, bottom = uniforms(key, batch_size, stratified=stratified)
    index: jax.Array = lax.platform_dependent(
        tree,
        top,
        bottom,
        cpu=functools.partial(_draw, capacity=capacity, descend=_descend_by_loop),
        default=functools.partial(_draw, capacity=capacity, descend=_descend_by_level),
    )
    return index, get(tree, index, capacity)


def uniforms(key: jax.Array, batch_size: int, *, stratified: bool) -> tuple[jax.Array, jax.Array]:
    """What `draw` takes from its key: two float32[B] in [0, 1), one for each half of the descent."""
    bits = jax.random.bits(key, (2, batch_size), jnp.uint32)
    # 24 bits, as many as float32 holds exactly; jax.random.uniform gives 23.
    uniform = (bits >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)
    top, bottom = uniform[0], uniform[1]
    if stratified:
        stratum = lax.iota(np.int32, batch_size).astype(jnp.float32)
        top = (stratum + top) / np.float32(batch_size)
    return top, bottom


def layout(capacity: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Nodes of each level, offset of each and the total, and the level from which `draw` takes its second uniform."""
    return (*_layout(capacity), _middle(capacity))


# ------------------------------------------------------------------------------------- set


def _combine(children: jax.Array, reduce: Reduce) -> jax.Array:
    """Reduces eight siblings on the last axis, in the one order that `_choose` relies on too."""
    c = [children[..., k] for k in range(_FAN_OUT)]
    f = _COMBINE[reduce]
    return f(f(f(c[0], c[1]), f(c[2], c[3])), f(f(c[4], c[5]), f(c[6], c[7])))


def _pad(level: jax.Array, reduce: Reduce) -> jax.Array:
    missing = -level.shape[0] % _FAN_OUT
    if not missing:
        return level
    return lax.pad(level, np.float32(_IDENTITY[reduce]), [(0, missing, 0)])


def _levels_above(level: jax.Array, capacity: int, first: int, reduce: Reduce) -> list[jax.Array]:
    """Computes the padded levels from `first` to the root, given the padded one below `first`."""
    counts, _ = _layout(capacity)
    levels = []
    for _ in range(first, len(counts)):
        level = _pad(_combine(level.reshape(-1, _FAN_OUT), reduce), reduce)
        levels.append(level)
    return levels


def _first_dense(capacity: int, batch_size: int) -> int:
    """Returns the lowest level with at most a node per index: `set` sweeps it and those above."""
    counts, _ = _layout(capacity)
    return next(level for level in range(1, len(counts)) if counts[level] <= batch_size)


def _set_by_loop(
    tree: jax.Array,
    index: jax.Array,
    leaf: jax.Array,
    keep: jax.Array,
    *,
    capacity: int,
    reduce: Reduce,
) -> jax.Array:
    """Leaves one by one, in order; then level by level the parents, one by one."""
    _, offsets = _layout(capacity)
    # A dropped write lands, with the value already there, in the padding beside the root; its
    # parents are recomputed to what they are. Both are cheaper than a branch.
    spare = offsets[-1] - 1
    position = jnp.where(keep, index, np.int32(spare))
    leaf = jnp.where(keep, leaf, np.float32(_IDENTITY[reduce]))
    node = jnp.where(keep, index, np.int32(0))

    def write(tree: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        position, leaf = item
        return lax.dynamic_update_slice(tree, leaf[None], (position,)), None

    tree, _ = lax.scan(write, tree, (position, leaf))
    first = _first_dense(capacity, index.shape[0])
    if first == 1:
        return tree

    def level(
        carry: tuple[jax.Array, jax.Array], item: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        tree, node = carry
        below, here = item
        node = node >> 3

        def parent(tree: jax.Array, node: jax.Array) -> tuple[jax.Array, None]:
            children = lax.dynamic_slice(tree, (below + node * 8,), (_FAN_OUT,))
            value = _combine(children, reduce)
            return lax.dynamic_update_slice(tree, value[None], (here + node,)), None

        tree, _ = lax.scan(parent, tree, node)
        return (tree, node), None

    table = jnp.asarray(offsets[:first], jnp.int32)
    (tree, _), _ = lax.scan(level, (tree, node), (table[:-1], table[1:]))
    return tree


def _set_by_level(
    tree: jax.Array,
    index: jax.Array,
    leaf: jax.Array,
    keep: jax.Array,
    *,
    capacity: int,
    reduce: Reduce,
) -> jax.Array:
    """All leaves at once, then all parents of a level at once."""
    _, offsets = _layout(capacity)
    keep_one = keep & keep_last(index)
    tree = tree.at[jnp.where(keep_one, index, np.int32(offsets[-1]))].set(leaf, mode="drop")
    node = jnp.where(keep, index, np.int32(0))
    for level in range(1, _first_dense(capacity, index.shape[0])):
        node = node >> 3
        value = _combine(_siblings(tree, node, offsets[level - 1]), reduce)
        # Duplicates write the same value, so their order does not matter.
        tree = tree.at[node + np.int32(offsets[level])].set(value, mode="promise_in_bounds")
    return tree


# ------------------------------------------------------------------------------------- draw

_Descend = Callable[[jax.Array, jax.Array, jax.Array, tuple[int, ...]], tuple[jax.Array, jax.Array]]


def _draw(tree: jax.Array, top: jax.Array, bottom: jax.Array, *, capacity: int, descend: _Descend) -> jax.Array:
    """Descends to the middle level with one uniform, from there with the other."""
    counts, offsets = _layout(capacity)
    depth, middle = len(counts) - 1, _middle(capacity)
    node = jnp.zeros(top.shape, jnp.int32)
    below = tuple(offsets[level - 1] for level in range(depth, 0, -1))
    node, _ = descend(tree, node, _scale(top, root(tree)), below[: depth - middle])
    if middle:
        total = tree.at[node + np.int32(offsets[middle])].get(mode="promise_in_bounds")
        node, _ = descend(tree, node, _scale(bottom, total), below[depth - middle :])
    # Cannot bind while parents equal the sum of their children; a caller's NaN can make it.
    return jnp.minimum(node, np.int32(capacity - 1))


def _middle(capacity: int) -> int:
    """Returns the level from which a draw goes on with its second uniform; 0 if never.

    High enough that each uniform chooses among far fewer nodes than its 2^24 values; low enough that
    strata, which only the first one keeps apart, are rarely narrower than the nodes it chooses among.
    """
    counts, _ = _layout(capacity)
    if capacity <= 512:
        return 0
    few = next(level for level, count in enumerate(counts) if count <= 4096)
    return min(max(few, 1), (len(counts) - 1) // 2)


def _scale(uniform: jax.Array, total: jax.Array) -> jax.Array:
    """Returns `uniform * total` with its last mantissa bit cleared.

    Compilers may contract `uniform * total - left` into one fused operation, here and not there.
    The mask in between makes that impossible, so that all paths round alike.
    """
    product = lax.bitcast_convert_type(uniform * total, jnp.int32)
    return lax.bitcast_convert_type(product & np.int32(-2), jnp.float32)


def _choose(children: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Picks one of eight siblings on the last axis by three halvings.

    Goes right if the query is not below the left sum *and* the right sum is above zero: whatever the
    rounding, a subtree that sums to zero is never entered from one that does not.

    Args:
      children: float32[..., 8], >= 0.
      query: float32[...], >= 0, below the sum of the children up to rounding.
    Returns:
      (int32[...] in `[0, 8)`, the query less the sum of the siblings to the left).
    """
    c = [children[..., k] for k in range(_FAN_OUT)]
    pairs = [c[0] + c[1], c[2] + c[3], c[4] + c[5], c[6] + c[7]]
    zero = np.float32(0)

    def halve(left: jax.Array, right: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
        go = (query >= left) & (right > zero)
        return go, jnp.where(go, query - left, query)

    first, query = halve(pairs[0] + pairs[1], pairs[2] + pairs[3], query)
    second, query = halve(jnp.where(first, pairs[2], pairs[0]), jnp.where(first, pairs[3], pairs[1]), query)
    quarter = [jnp.where(first, c[k + 4], c[k]) for k in range(4)]
    left, right = (jnp.where(second, quarter[k + 2], quarter[k]) for k in range(2))
    third, query = halve(left, right, query)
    child = first.astype(jnp.int32) * 4 + second.astype(jnp.int32) * 2 + third.astype(jnp.int32)
    return child, query


def _descend_by_loop(
    tree: jax.Array, node: jax.Array, query: jax.Array, below: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Level by level, the queries one by one."""

    # Node and query travel in one int32 pair: XLA computes every output of a loop body in a kernel
    # of its own, so two outputs would do the choosing twice.
    def pack(node: jax.Array, query: jax.Array) -> jax.Array:
        return jnp.stack([node, lax.bitcast_convert_type(query, jnp.int32)], axis=-1)

    def unpack(pair: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pair[..., 0], lax.bitcast_convert_type(pair[..., 1], jnp.float32)

    def level(pairs: jax.Array, offset: jax.Array) -> tuple[jax.Array, None]:
        def step(_: None, pair: jax.Array) -> tuple[None, jax.Array]:
            node, query = unpack(pair)
            children = lax.dynamic_slice(tree, (offset + node * 8,), (_FAN_OUT,))
            child, query = _choose(children, query)
            return None, pack(node * 8 + child, query)

        return lax.scan(step, None, pairs)[1], None

    pairs, _ = lax.scan(level, pack(node, query), jnp.asarray(below, jnp.int32))
    return unpack(pairs)


def _descend_by_level(
    tree: jax.Array, node: jax.Array, query: jax.Array, below: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Level by level, all queries at once."""
    for offset in below:
        child, query = _choose(_siblings(tree, node, offset), query)
        node = node * 8 + child
    return node, query


def _siblings(tree: jax.Array, node: jax.Array, offset: int) -> jax.Array:
    """Gathers the children, float32[B, 8], of nodes int32[B]; they start at `offset`."""
    start = node * 8 + np.int32(offset)
    return jax.vmap(lambda i: lax.dynamic_slice(tree, (i,), (_FAN_OUT,)))(start)
