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
  * On CPUs `set` is one loop over the indices, each climbing by itself: XLA makes one kernel of it, and
    the processor overlaps the climbs (a loop for each level took up to 1.5 times as long).
  * `draw` takes all queries down a level at a time. Each of eight siblings is a gather of its own, from
    the array shifted by its place, so that a level is elementwise arithmetic, one kernel that works on
    eight queries at once: half the time of a loop over the queries. Gathering rows of eight siblings is
    not vectorized (1.6 times as long), writing out all levels takes 2 s to compile, fan-outs of 64 and
    more and a `cumsum` over the leaves also lost.
  * XLA's CPU compiler hands whatever reads a large array to its thread pool, for 32 queries as for
    32,000; a handover costs as much as 100 queries. See `_SPARE` for how small batches avoid it.
  * On other platforms `set` scatters and gathers by level and `draw` is written out, for one kernel:
    neither was ever timed there. `lax.platform_dependent` picks at lowering; both paths do the same
    arithmetic in the same order.
Source: Schaul et al. 2016, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf import _words
from fbuf._duplicates import keep_last

__all__ = ["draw", "get", "init", "layout", "nodes", "rebuild", "root", "set", "set_all", "uniforms"]

Reduce = Literal["sum", "min", "max"]

_FAN_OUT = 8
_MANY = 8192  # queries that are worth a thread pool
# XLA hands what reads a whole array of more than half a megabyte to its thread pool, for however few queries, unless it
# writes a slice in place; so fewer queries than `_MANY` come with one more, which is not drawn, and are such a slice.
_SPARE = 1
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
    return set_all((tree,), index, (leaf,), capacity, reduce=(reduce,))[0]


def set_all(
    trees: Sequence[jax.Array],
    index: jax.Array,
    leaves: Sequence[jax.Array],
    capacity: int,
    *,
    reduce: Sequence[Reduce],
) -> tuple[jax.Array, ...]:
    """Writes leaves of several trees at the same indices: a sum, and the least or the largest beside it.

    On accelerators in one sweep, which looks for duplicates once; on CPUs tree by tree.

    Args:
      trees: each as for `set`.
      index: as for `set`.
      leaves: float32[B] for each tree.
      capacity: `C`, static.
      reduce: one for each tree.
    Returns:
      The new trees, each bit for bit what `set` makes of it.
    """
    if index.shape[0] == 0:
        return tuple(trees)
    trees, leaves = lax.stop_gradient((tuple(trees), tuple(leaves)))
    if (
        index.shape[0] == 1
    ):  # XLA unrolls a loop over one, and writes a scatter of one as an update; neither is in place
        index = jnp.concatenate([index, jnp.full((1,), capacity, index.dtype)])
        leaves = tuple(jnp.concatenate([leaf, leaf]) for leaf in leaves)
    keep = (index >= 0) & (index < capacity)
    trees = lax.platform_dependent(
        trees,
        index,
        leaves,
        keep,
        cpu=functools.partial(_set_by_loop, capacity=capacity, reduce=tuple(reduce)),
        default=functools.partial(_set_by_level, capacity=capacity, reduce=tuple(reduce)),
    )
    # The few levels left are cheaper swept whole, and lie side by side at the end of the array.
    _, offsets = _layout(capacity)
    first = _first_dense(capacity, index.shape[0])
    swept = []
    for tree, one in zip(trees, reduce, strict=True):
        below = lax.slice(tree, (offsets[first - 1],), (offsets[first],))
        above = jnp.concatenate(_levels_above(below, capacity, first, one))
        swept.append(lax.dynamic_update_slice(tree, above, (np.int32(offsets[first]),)))
    return tuple(swept)


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
    number = batch_size + (_SPARE if batch_size < _MANY else 0)
    top, bottom = uniforms(key, batch_size, number, stratified=stratified)
    drawn: tuple[jax.Array, jax.Array] = lax.platform_dependent(
        tree,
        top,
        bottom,
        cpu=functools.partial(_descend_by_loop, batch=batch_size, capacity=capacity),
        default=functools.partial(_descend_by_level, batch=batch_size, capacity=capacity),
    )
    return drawn


def uniforms(
    key: jax.Array, batch_size: int, number: int | None = None, *, stratified: bool
) -> tuple[jax.Array, jax.Array]:
    """What `draw` of B takes from its key, of `number` (None: B) queries: two float32[number] in [0, 1), one for each half of
    the descent. The first B are the same whatever `number`."""
    number = batch_size if number is None else number
    top, bottom = (_unit(words) for words in _words.pairs(key, number))
    if stratified:
        stratum = lax.iota(np.int32, number).astype(jnp.float32)
        top = (stratum + top) / np.float32(batch_size)
    return top, bottom


def layout(capacity: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Nodes of each level, offset of each and the total, and the level from which `draw` takes its second uniform."""
    return (*_layout(capacity), _middle(capacity))


# ------------------------------------------------------------------------------------- set


def _combine(children: Sequence[jax.Array], reduce: Reduce) -> jax.Array:
    """Reduces eight siblings, in the one order that `_choose` relies on too."""
    f, c = _COMBINE[reduce], children
    return f(f(f(c[0], c[1]), f(c[2], c[3])), f(f(c[4], c[5]), f(c[6], c[7])))


def _columns(level: jax.Array) -> list[jax.Array]:
    """Splits a padded level into the first, second, ... of every eight siblings."""
    rows = level.reshape(-1, _FAN_OUT)
    return [rows[:, k] for k in range(_FAN_OUT)]


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
        level = _pad(_combine(_columns(level), reduce), reduce)
        levels.append(level)
    return levels


def _first_dense(capacity: int, batch_size: int) -> int:
    """Returns the lowest level with at most a node per index: `set` sweeps it and those above."""
    counts, _ = _layout(capacity)
    return next(level for level in range(1, len(counts)) if counts[level] <= batch_size)


def _set_by_loop(
    trees: tuple[jax.Array, ...],
    index: jax.Array,
    leaves: tuple[jax.Array, ...],
    keep: jax.Array,
    *,
    capacity: int,
    reduce: tuple[Reduce, ...],
) -> tuple[jax.Array, ...]:
    """One index after the other, in order: the leaf, then its parents, so that each is last made of its last children."""
    _, offsets = _layout(capacity)
    sparse = range(1, _first_dense(capacity, index.shape[0]))
    # A dropped write lands, with the value already there, in the padding beside the root; its
    # parents are recomputed to what they are. Both are cheaper than a branch.
    position = jnp.where(keep, index, np.int32(offsets[-1] - 1))
    node = jnp.where(keep, index, np.int32(0))

    def climb(tree: jax.Array, leaf: jax.Array, one: Reduce) -> jax.Array:
        def write(tree: jax.Array, item: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            position, node, leaf = item
            tree = lax.dynamic_update_slice(tree, leaf[None], (position,))
            for level in sparse:
                node = node >> 3
                children = lax.dynamic_slice(tree, (node * 8 + np.int32(offsets[level - 1]),), (_FAN_OUT,))
                value = _combine([children[k] for k in range(_FAN_OUT)], one)
                tree = lax.dynamic_update_slice(tree, value[None], (node + np.int32(offsets[level]),))
            return tree, None

        leaf = jnp.where(keep, leaf, np.float32(_IDENTITY[one]))
        return lax.scan(write, tree, (position, node, leaf))[0]

    # A loop for each tree: of two trees in one loop XLA copies both (jax 0.10.2).
    return tuple(map(climb, trees, leaves, reduce))


def _set_by_level(
    trees: tuple[jax.Array, ...],
    index: jax.Array,
    leaves: tuple[jax.Array, ...],
    keep: jax.Array,
    *,
    capacity: int,
    reduce: tuple[Reduce, ...],
) -> tuple[jax.Array, ...]:
    """All leaves at once, then all parents of a level at once."""
    _, offsets = _layout(capacity)
    position = jnp.where(keep & keep_last(index), index, np.int32(offsets[-1]))
    trees = tuple(tree.at[position].set(leaf, mode="drop") for tree, leaf in zip(trees, leaves, strict=True))
    node = jnp.where(keep, index, np.int32(0))
    for level in range(1, _first_dense(capacity, index.shape[0])):
        node = node >> 3
        # Duplicates write the same value, so their order does not matter.
        trees = tuple(
            tree.at[node + np.int32(offsets[level])].set(
                _combine(_siblings(tree, node, offsets[level - 1]), one), mode="promise_in_bounds"
            )
            for tree, one in zip(trees, reduce, strict=True)
        )
    return trees


# ------------------------------------------------------------------------------------- draw


def _unit(words: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1) of 24 bits, as many as it holds exactly; `jax.random.uniform` gives 23."""
    return (words >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)


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


def _choose(children: list[jax.Array], query: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Picks one of eight siblings by three halvings.

    Goes right if the query is not below the left sum *and* the right sum is above zero: whatever the
    rounding, a subtree that sums to zero is never entered from one that does not.

    Args:
      children: eight of float32[B], >= 0.
      query: float32[B], >= 0, below the sum of the children up to rounding.
    Returns:
      (int32[B] in `[0, 8)`, the sibling picked, the query less the sum of the siblings to its left).
    """
    c = children
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
    return child, jnp.where(third, right, left), query


def _steps(capacity: int) -> tuple[tuple[int, bool, bool], ...]:
    """Returns of each step down: where the children's level begins, whether it ends at the middle, or at the leaves."""
    counts, offsets = _layout(capacity)
    middle = _middle(capacity)
    return tuple((offsets[level], level == middle, level == 0) for level in range(len(counts) - 2, -1, -1))


def _down(
    tree: jax.Array,
    node: jax.Array,
    query: jax.Array,
    bottom: jax.Array,
    step: tuple[jax.Array | int, jax.Array | bool, jax.Array | bool],
) -> tuple[jax.Array, jax.Array]:
    """One level down for all queries: the child, and the query in it; at the leaves the leaf in place of the query."""
    below, at_middle, at_leaves = step
    child, value, query = _choose(_siblings(tree, node, below), query)
    query = jnp.where(at_middle, _scale(bottom, value), query) if at_middle is not False else query
    query = jnp.where(at_leaves, value, query) if at_leaves is not False else query
    return node * 8 + child, query


def _siblings(tree: jax.Array, node: jax.Array, below: jax.Array | int) -> list[jax.Array]:
    """Gathers the children, eight of float32[B], of nodes int32[B]; they start at `below`.

    The k-th from the array without its first k elements, so that all eight have one index and one check of it.
    """
    start = (node * 8 + jnp.asarray(below, jnp.int32))[:, None]
    last = tree.shape[0] - _FAN_OUT + 1
    one = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return [lax.gather(lax.slice(tree, (k,), (last + k,)), start, one, (1,), mode=mode) for k in range(_FAN_OUT)]


def _descend_by_loop(
    tree: jax.Array, top: jax.Array, bottom: jax.Array, *, batch: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """All queries a level at a time, in a loop over the levels: one kernel to compile, and to run `log C` times."""

    # Node and query travel in one array: XLA computes every output of a loop body in a kernel of its own, so two
    # outputs would do the choosing twice. Bits of node as a float are moved, never computed with.
    def pack(node: jax.Array, query: jax.Array) -> jax.Array:
        return lax.complex(query, lax.bitcast_convert_type(node, jnp.float32))

    def unpack(pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.bitcast_convert_type(lax.imag(pairs), jnp.int32), lax.real(pairs)

    def level(pairs: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
        node, query = unpack(lax.dynamic_slice(pairs, (step[3],), (batch,)))
        one = (step[0], step[1] > 0, step[2] > 0)
        pairs = lax.dynamic_update_slice(pairs, pack(*_down(tree, node, query, bottom[:batch], one)), (step[3],))
        return pairs, None

    start = pack(jnp.zeros(top.shape, jnp.int32), _scale(top, root(tree)))
    table = np.asarray([(*step, 0) for step in _steps(capacity)], np.int32)
    pairs, _ = lax.scan(level, start, jnp.asarray(table))
    index, leaf = unpack(pairs[:batch])
    return _inside(index, capacity), leaf


def _descend_by_level(
    tree: jax.Array, top: jax.Array, bottom: jax.Array, *, batch: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """All queries a level at a time, written out: arithmetic and gathers that one kernel can hold."""
    node, query = jnp.zeros((batch,), jnp.int32), _scale(top[:batch], root(tree))
    for step in _steps(capacity):
        node, query = _down(tree, node, query, bottom[:batch], step)
    return _inside(node, capacity), query


def _inside(index: jax.Array, capacity: int) -> jax.Array:
    """Cannot bind while parents equal the sum of their children; a caller's NaN can make it."""
    return jnp.minimum(index, np.int32(capacity - 1))
