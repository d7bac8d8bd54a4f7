"""Update and draw from a functional sum, min or max tree over C leaves: one float32 array of fan-out 8.

Layout: leaves first (leaf i is element i), then each level of parents, the root last. Every level is padded to a multiple of 8
with the identity of the reduction, so eight siblings share a cache line. The array holds about 8 C / 7 elements.

Every parent is recomputed from its children in one fixed order, so it equals their reduction bit for bit and never drifts.
CPUs and accelerators use different loops with the same arithmetic; `lax.platform_dependent` selects at lowering.

Source: Schaul et al. 2016, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import random
from fbuf._core import control_flow

Reduce = Literal["sum", "min", "max"]
Trees = tuple[Array, ...]
Read = Callable[[Array, Array, Array], list[Array]]
"""Returns eight siblings of each node, as `siblings` does."""

FAN_OUT = 8

_MAX_CAPACITY = 2**30  # 8 C / 7 nodes must fit the int32 that indexes them
_COMBINE: dict[str, Callable[[Array, Array], Array]] = {"sum": lax.add, "min": lax.min, "max": lax.max}
_IDENTITY = {"sum": 0.0, "min": np.inf, "max": -np.inf}

_MANY = 8192  # queries that are worth a thread pool
# XLA on CPU hands any read of an array above 0.5 MB to its thread pool, unless the read writes a slice in place.
# Batches below `_MANY` therefore carry one extra query that is not drawn, and are such a slice.
_SPARE = 1

_CACHED = 2**18  # leaves of a tree that the cache of a core holds
_SWEPT = 2**17  # nodes of a level that GPUs recompute whole: one kernel for two levels, instead of two for each
_COMPARED = 1024  # indices of which accelerators compare each pair, in one kernel
_FEW = 256  # nodes that are recomputed in a microsecond
_SCATTERED = 32  # leaves a query from which on neighbouring queries share no cache lines


@lru_cache(maxsize=256)
def layout(capacity: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of nodes of each level, and the offset of each level, then the total. Level 0 holds the leaves."""
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ValueError(f"sum_tree: capacity is {capacity}; expected 1 to 2**30. Use several buffers.")
    counts = [capacity]
    while counts[-1] > 1 or len(counts) == 1:
        counts.append(-(-counts[-1] // FAN_OUT))
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // FAN_OUT) * FAN_OUT)
    return tuple(counts), tuple(offsets)


def nodes(capacity: int) -> int:
    """Return the number of float32 elements of a tree, about `8 * capacity / 7`."""
    return layout(capacity)[1][-1]


def init(capacity: int, fill: float = 0.0) -> Array:
    """Make a tree whose leaves and parents are all `fill`.

    Args:
      capacity: `C >= 1`, static; the leaves are `[0, C)`.
      fill: The identity of the reduction: 0 for a sum, `inf` for a min, `-inf` for a max.
    Returns:
      float32[nodes(capacity)].
    Raises:
      ValueError: any other `fill`, or a capacity outside `[1, 2**30]`.
    """
    if fill not in (0.0, np.inf, -np.inf):
        raise ValueError(f"sum_tree.init: fill is {fill}; expected 0, inf or -inf. Use rebuild for other leaves.")
    return jnp.full((nodes(capacity),), fill, jnp.float32)


def get(tree: Array, index: Array) -> Array:
    """Read leaves.

    Args:
      tree: float32[nodes(capacity)].
      index: int32[...], each in `[0, capacity)` (not checked).
    Returns:
      float32[...] of the shape of `index`.
    """
    return tree.at[index].get(mode="promise_in_bounds")


def root(tree: Array) -> Array:
    """Return the reduction of all leaves, float32[]: the first of the last eight elements."""
    return tree[tree.shape[0] - FAN_OUT]


def rebuild(leaves: Array, *, reduce: Reduce = "sum") -> Array:
    """Make a tree from all its leaves in one vectorized sweep.

    Args:
      leaves: float32[C].
      reduce: Reduction of the parents.
    Returns:
      float32[nodes(C)], bitwise equal to `set` of every leaf.
    Cost: O(C).
    """
    levels = [_pad(lax.stop_gradient(leaves), reduce)]
    for _ in layout(leaves.shape[0])[0][1:]:
        levels.append(_level_above(levels[-1], reduce=reduce))
    return jnp.concatenate(levels)


def set(tree: Array, index: Array, leaf: Array, capacity: int, *, reduce: Reduce = "sum") -> Array:
    """Write leaves and recompute the parents above them.

    Args:
      tree: float32[nodes(capacity)]; written in place when donated or carried by a scan.
      index: int32[B]. Indices outside `[0, capacity)` are dropped; the last of equal indices wins.
      leaf: float32[B], finite, and >= 0 with a finite total for a tree that `draw` reads.
      capacity: `C`, static.
      reduce: Reduction of the parents; the same in every call for one tree.
    Returns:
      The new tree.
    Cost: O(B log C), at most O(B + C / 7).
    """
    return set_all((tree,), index, (leaf,), capacity, reduce=(reduce,))[0]


def set_all(
    trees: Sequence[Array],
    index: Array,
    leaves: Sequence[Array],
    capacity: int,
    *,
    reduce: Sequence[Reduce],
    distinct: bool = False,
) -> Trees:
    """Write leaves of several trees at the same indices.

    Accelerators write all trees in one sweep; CPUs write tree by tree.

    Args:
      trees: Each as for `set`.
      index: As for `set`.
      leaves: float32[B] for each tree.
      capacity: `C`, static.
      reduce: One reduction for each tree.
      distinct: Whether no index in `[0, capacity)` occurs twice on accelerators, which then need not look for the last.
    Returns:
      The new trees, bitwise equal to `set` of each.
    """
    if index.shape[0] == 0:
        return tuple(trees)
    trees, leaves = lax.stop_gradient((tuple(trees), tuple(leaves)))
    if index.shape[0] == 1:  # XLA does not run a loop or a scatter over one index in place
        index = jnp.concatenate([index, jnp.full((1,), capacity, index.dtype)])
        leaves = tuple(jnp.concatenate([leaf, leaf]) for leaf in leaves)
    few, many = (_first_dense(capacity, max(index.shape[0], nodes)) for nodes in (0, _SWEPT))
    by_loop, by_level = (partial(f, capacity=capacity, reduce=tuple(reduce)) for f in (_set_by_loop, _set_by_level))
    return control_flow.platform_dependent(
        trees,
        index,
        leaves,
        cpu=partial(by_loop, first=few),
        gpu=partial(by_level, first=many, read=_sibling_windows, distinct=distinct),
        default=partial(by_level, first=few, read=_sibling_elements, distinct=distinct),
    )


def _sweep(trees: Trees, capacity: int, first: int, reduce: tuple[Reduce, ...]) -> Trees:
    """Recompute the levels from `first` on, which are contiguous at the end of the array, whole."""
    _, offsets = layout(capacity)
    swept = []
    for tree, one in zip(trees, reduce, strict=True):
        below = lax.slice(tree, (offsets[first - 1],), (offsets[first],))
        above = jnp.concatenate(_levels_above(below, capacity, first, one))
        swept.append(lax.dynamic_update_slice(tree, above, (np.int32(offsets[first]),)))
    return tuple(swept)


def _combine(children: Sequence[Array], reduce: Reduce) -> Array:
    """Reduce eight siblings in a fixed order; `_choose` adds them in the same order."""
    f, c = _COMBINE[reduce], children
    return f(f(f(c[0], c[1]), f(c[2], c[3])), f(f(c[4], c[5]), f(c[6], c[7])))


def _columns(level: Array) -> list[Array]:
    """Split a padded level into the first, second, ... of every eight siblings."""
    rows = level.reshape(-1, FAN_OUT)
    return [rows[:, k] for k in range(FAN_OUT)]


def _pad(level: Array, reduce: Reduce) -> Array:
    missing = -level.shape[0] % FAN_OUT
    if not missing:
        return level
    return lax.pad(level, np.float32(_IDENTITY[reduce]), [(0, missing, 0)])


@partial(jax.jit, static_argnames="reduce")
def _level_above(level: Array, *, reduce: Reduce) -> Array:
    """Compute the padded level above a padded one. Jitted alone, or XLA recomputes lower levels for each upper one."""
    return _pad(_combine(_columns(level), reduce), reduce)


def _levels_above(level: Array, capacity: int, first: int, reduce: Reduce) -> list[Array]:
    """Compute the padded levels from `first` to the root, given the padded level below `first`."""
    levels = []
    for _ in range(first, len(layout(capacity)[0])):
        level = _pad(_combine(_columns(level), reduce), reduce)
        levels.append(level)
    return levels


def _first_dense(capacity: int, batch_size: int) -> int:
    """Return the lowest level with at most one node per index: `set` sweeps it and all levels above."""
    counts, _ = layout(capacity)
    return next(level for level in range(1, len(counts)) if counts[level] <= batch_size)


def _is_leaf(index: Array, capacity: int) -> Array:
    return (index >= 0) & (index < capacity)


def _set_by_loop(
    trees: Trees, index: Array, leaves: Trees, *, capacity: int, reduce: tuple[Reduce, ...], first: int
) -> Trees:
    """Write index after index, each with the parents below level `first`, then sweep the rest."""

    def climb(tree: Array, leaves: Array, one: Reduce) -> Array:
        def write(tree: Array, item: Trees) -> tuple[Array, None]:
            index, leaf = item
            return _write_leaf(tree, index, leaf, capacity, one, first), None

        return control_flow.scan(write, tree, (index, leaves))[0]

    # One loop per tree: XLA copies both trees of a shared loop (jax 0.10.2).
    return _sweep(tuple(map(climb, trees, leaves, reduce)), capacity, first, reduce)


def _write_leaf(tree: Array, index: Array, leaf: Array, capacity: int, reduce: Reduce, first: int) -> Array:
    """Write one leaf, and recompute its parents below level `first`."""
    _, offsets = layout(capacity)
    keep = _is_leaf(index, capacity)
    # A dropped write stores the identity in the padding beside the root and recomputes parents: cheaper than a branch.
    leaf = lax.select(keep, leaf, lax.full_like(leaf, _IDENTITY[reduce]))
    # Unsigned: JAX adds the size of the array to a signed index that is negative, in five instructions each.
    position = lax.select(keep, index, lax.full_like(index, offsets[-1] - 1)).astype(jnp.uint32)
    tree = lax.dynamic_update_slice(tree, leaf[None], (position,))
    node = lax.select(keep, index, lax.full_like(index, 0)).astype(jnp.uint32)
    for level in range(1, first):
        node = node >> np.uint32(3)
        children = node * np.uint32(FAN_OUT) + np.uint32(offsets[level - 1])
        tree = _write_parent(tree, node + np.uint32(offsets[level]), children, reduce)
    return tree


def set_in_turn(
    tree: Array, item: Callable[[Array], tuple[Array, Array]], which: range, capacity: int, *, reduce: Reduce = "sum"
) -> Array:
    """Write leaves as `set`, by one loop of few operations: `item(i)` returns index and leaf of each, int32[] and float32[]."""
    counts, offsets = layout(capacity)
    first = _first_dense(capacity, max(len(which), _FEW))

    def write(tree: Array, i: Array) -> tuple[Array, None]:
        index, leaf = item(i)
        return _write_leaf(tree, index, leaf, capacity, reduce, first), None

    def recompute(tree: Array, node: Array) -> tuple[Array, None]:
        return _write_parent(tree, node[0], node[1], reduce), None

    tree = control_flow.scan(write, tree, jnp.arange(which.start, which.stop, dtype=jnp.int32))[0]
    upper = []  # nodes, and their first children
    for level in range(first, len(counts)):
        node = np.arange(counts[level], dtype=np.uint32)
        upper.append(np.stack([node + offsets[level], node * FAN_OUT + offsets[level - 1]], axis=1))
    return control_flow.scan(recompute, tree, np.concatenate(upper, dtype=np.uint32))[0]  # `_sweep` has more operations


def _write_parent(tree: Array, position: Array, children: Array, reduce: Reduce) -> Array:
    """Recompute a node from its children, which begin at uint32[] `children`."""
    below = lax.dynamic_slice(tree, (children,), (FAN_OUT,))
    value = _combine([below[k] for k in range(FAN_OUT)], reduce)
    return lax.dynamic_update_slice(tree, value[None], (position,))


def _set_by_level(
    trees: Trees,
    index: Array,
    leaves: Trees,
    *,
    capacity: int,
    reduce: tuple[Reduce, ...],
    first: int,
    read: Read,
    distinct: bool = False,
) -> Trees:
    """Write all leaves at once, then all parents of each level below `first` at once, then sweep the rest."""
    _, offsets = layout(capacity)
    keep = _is_leaf(index, capacity)
    written = keep if distinct else keep & keep_last(index)
    position = jnp.where(written, index, np.int32(offsets[-1]))
    trees = tuple(tree.at[position].set(leaf, mode="drop") for tree, leaf in zip(trees, leaves, strict=True))
    node = jnp.where(keep, index, np.int32(0))
    for level in range(1, first):
        node = node >> 3
        # Duplicates write the same value, so their order does not matter.
        trees = tuple(
            tree.at[node + np.int32(offsets[level])].set(
                _reduced(tree, node, np.int32(offsets[level - 1]), one, read), mode="promise_in_bounds"
            )
            for tree, one in zip(trees, reduce, strict=True)
        )
    return _sweep(trees, capacity, first, reduce)


def siblings(tree: Array, node: Array, below: Array | int) -> list[Array]:
    """Gather the children, eight of float32[B], of nodes int32[B]; their level starts at `below`.

    Child k is gathered from the array without its first k elements, so all eight share one index and one bounds check.
    """
    start = (node * 8 + jnp.asarray(below, jnp.int32))[:, None]
    last = tree.shape[0] - FAN_OUT + 1
    one = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return [lax.gather(lax.slice(tree, (k,), (last + k,)), start, one, (1,), mode=mode) for k in range(FAN_OUT)]


@partial(jax.jit, static_argnames=("reduce", "read"))
def _reduced(tree: Array, node: Array, below: Array, reduce: Reduce, read: Read) -> Array:
    """Reduce the children of nodes; traced once for all levels, as `_chosen` is."""
    return _combine(read(tree, node, below), reduce)


@partial(jax.jit, static_argnames="read")
def _chosen(tree: Array, node: Array, query: Array, below: Array, read: Read) -> tuple[Array, Array, Array]:
    """Return the child of each node that its query is in, its value, and the query in it."""
    child, value, query = _choose(read(tree, node, below), query)
    return node * 8 + child, value, query


def _sibling_elements(tree: Array, node: Array, below: Array) -> list[Array]:
    """`siblings` as one gather of elements: a TPU makes copies of the tree for the slices of eight."""
    at = (node * 8 + below)[None, :] + lax.iota(np.int32, FAN_OUT)[:, None]
    found = tree.at[at].get(mode="promise_in_bounds")
    return [found[k] for k in range(FAN_OUT)]


def _sibling_windows(tree: Array, node: Array, below: Array) -> list[Array]:
    """`siblings` as one gather of windows, which takes fewer kernels on a GPU; on a TPU it is a loop."""
    start = (node * 8 + below)[:, None]
    windows = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    found = lax.gather(tree, start, windows, (FAN_OUT,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    return [found[:, k] for k in range(FAN_OUT)]


def keep_last(index: Array, below: int | None = None) -> Array:
    """Mark the last occurrence of every value.

    Args:
      index: int32[B], any values.
      below: Upper bound, exclusive, of values >= 0, if known.
    Returns:
      bool[B], True where no later element of `index` has the same value.
    Cost: one sort, O(B log B); an eighth of the time on CPUs if B `below` <= 2^32. Accelerators compare up to 1024 values
      pair by pair.
    Example:
      >>> keep_last(jnp.array([4, 7, 4], jnp.int32))
      Array([False,  True,  True], dtype=bool)
    """
    batch = index.shape[0]
    if batch < 2:
        return jnp.ones((batch,), jnp.bool_)
    by_sort = partial(_keep_last_by_sort, below=below)
    if batch > _COMPARED:
        return by_sort(index)
    return control_flow.platform_dependent(index, cpu=by_sort, default=_keep_last_by_comparison)


def _keep_last_by_comparison(index: Array) -> Array:
    order = lax.iota(np.int32, index.shape[0])
    again = (index[:, None] == index[None, :]) & (order[:, None] < order[None, :])
    return ~jnp.any(again, axis=1)


def _keep_last_by_sort(index: Array, below: int | None) -> Array:
    batch = index.shape[0]
    if below is not None and below * batch <= 2**32:
        key = lax.sort(index.astype(jnp.uint32) * np.uint32(batch) + lax.iota(np.uint32, batch), is_stable=False)
        value, position = key // np.uint32(batch), key % np.uint32(batch)
    else:
        # Stable: equal values keep their order, so the end of a run is the last occurrence.
        value, position = lax.sort((index, lax.iota(np.int32, batch)), num_keys=1, is_stable=True, dimension=0)
    last = jnp.concatenate([value[1:] != value[:-1], jnp.ones((1,), jnp.bool_)])
    result = jnp.zeros((batch,), jnp.bool_)
    return result.at[position].set(last, unique_indices=True, mode="promise_in_bounds")


def draw(tree: Array, key: Array, batch_size: int, capacity: int, *, stratified: bool) -> tuple[Array, Array]:
    r"""Draw leaves with probability :math:`P(i) = leaf_i / \sum_k leaf_k`, with replacement.

    Args:
      tree: float32[nodes(capacity)], a sum tree with finite leaves >= 0.
      key: PRNG key, typed or raw; consumed.
      batch_size: `B`, static.
      capacity: `C`, static.
      stratified: Draw one leaf from each of `B` equal shares of the total, in order, for less variance. Above 512 leaves, draws
        within a block of neighbors are independent (65 blocks for 513 leaves, 1,954 for a million).
    Returns:
      index: int32[B] in `[0, capacity)`; never a zero leaf while the root is above zero, else 0 everywhere.
      leaf: float32[B], the leaves at `index`.
    Cost: O(B log C).
    Source: Schaul et al. 2016, appendix B.2.1 (stratified).
    """
    return descend(
        tree, *uniforms(key, batch_size, with_spare(batch_size), stratified=stratified), batch_size, capacity
    )


def with_spare(batch_size: int) -> int:
    """Return how many queries `descend` should get."""
    return batch_size + (_SPARE if batch_size < _MANY else 0)


def descend(tree: Array, top: Array, bottom: Array, batch_size: int, capacity: int) -> tuple[Array, Array]:
    """Return the index and the leaf of the first B queries of `uniforms`, as `draw` does."""
    tree = lax.stop_gradient(tree)
    by_loop, by_level = (partial(f, batch=batch_size, capacity=capacity) for f in (_descend_by_loop, _descend_by_level))
    return control_flow.platform_dependent(
        tree,
        top,
        bottom,
        cpu=by_loop,
        gpu=partial(by_level, read=_sibling_windows, in_halves=True),
        default=partial(by_level, read=_sibling_elements),
    )


def uniforms(key: Array, batch_size: int, number: int | None = None, *, stratified: bool) -> tuple[Array, Array]:
    """Return the two uniforms float32[number] in [0, 1) of each query of `draw`: one for each half of the descent.

    `number` (None: B) may exceed B; the first B do not depend on it.
    """
    number = batch_size if number is None else number
    top, bottom = map(random.unit, random.pairs(key, number))
    if stratified:
        stratum = lax.iota(np.int32, number).astype(jnp.float32)
        top = (stratum + top) / np.float32(batch_size)
    return top, bottom


def middle(capacity: int) -> int:
    """Return the level from which a draw uses its second uniform; 0: never.

    Each uniform then chooses among far fewer nodes than its 2^24 values. Only the first uniform is stratified, so strata
    must be wider than the nodes it chooses among.
    """
    counts, _ = layout(capacity)
    if capacity <= 512:
        return 0
    few = next(level for level, count in enumerate(counts) if count <= 4096)
    return min(max(few, 1), (len(counts) - 1) // 2)


def _scale(uniform: Array, total: Array) -> Array:
    """Return `uniform * total` with its last mantissa bit cleared.

    Compilers may contract `uniform * total - left` into one fused operation on one path only. The mask prevents it.
    """
    product = lax.bitcast_convert_type(uniform * total, jnp.int32)
    return lax.bitcast_convert_type(product & np.int32(-2), jnp.float32)


def _choose(children: list[Array], query: Array) -> tuple[Array, Array, Array]:
    """Pick one of eight siblings by three halvings.

    Go right if the query is not below the left sum and the right sum is above zero. Rounding then never enters a subtree that
    sums to zero from one that does not.

    Args:
      children: eight of float32[B], >= 0.
      query: float32[B], >= 0, below the sum of the children up to rounding.
    Returns:
      int32[B] in `[0, 8)`, the sibling picked, and the query less the sum of the siblings to its left.
    """
    c = children
    pairs = [c[0] + c[1], c[2] + c[3], c[4] + c[5], c[6] + c[7]]
    zero = np.float32(0)

    def halve(left: Array, right: Array, query: Array) -> tuple[Array, Array]:
        go = (query >= left) & (right > zero)
        return go, lax.select(go, query - left, query)

    first, query = halve(pairs[0] + pairs[1], pairs[2] + pairs[3], query)
    second, query = halve(lax.select(first, pairs[2], pairs[0]), lax.select(first, pairs[3], pairs[1]), query)
    quarter = [lax.select(first, c[k + 4], c[k]) for k in range(4)]
    left, right = (lax.select(second, quarter[k + 2], quarter[k]) for k in range(2))
    third, query = halve(left, right, query)
    child = first.astype(jnp.int32) * 4 + second.astype(jnp.int32) * 2 + third.astype(jnp.int32)
    return child, lax.select(third, right, left), query


def _steps(capacity: int) -> tuple[tuple[int, bool, bool], ...]:
    """Return of each step down the offset of the children's level, and whether it ends at the middle or at the leaves."""
    counts, offsets = layout(capacity)
    half = middle(capacity)
    return tuple((offsets[level], level == half, level == 0) for level in range(len(counts) - 2, -1, -1))


def _down(
    children: list[Array], node: Array, query: Array, bottom: Array, at_middle: Array, at_leaves: Array
) -> tuple[Array, Array]:
    """Move all queries one level down: return the child, and the query in it (at the leaves: the leaf)."""
    child, value, query = _choose(children, query)
    for flag, other in ((at_middle, _scale(bottom, value)), (at_leaves, value)):
        query = lax.select(lax.broadcast(flag, query.shape), other, query)
    return node * 8 + child, query


def _descend_by_loop(tree: Array, top: Array, bottom: Array, *, batch: int, capacity: int) -> tuple[Array, Array]:
    """Move all queries down in a loop over the levels: one kernel, run `log C` times.

    Above `_CACHED` leaves, a kernel of its own reads the first of each eight siblings. It is so short that a core waits for
    dozens of cache lines at a time, which the other seven then share.
    """
    ahead = capacity > max(_CACHED, _SCATTERED * batch)

    # Node and query share one array: XLA would run `_choose` twice for two outputs. The bits of the node are only moved.
    def pack(node: Array, query: Array) -> Array:
        return lax.complex(query, lax.bitcast_convert_type(node, jnp.float32))

    def unpack(pairs: Array) -> tuple[Array, Array]:
        return lax.bitcast_convert_type(lax.imag(pairs), jnp.int32), lax.real(pairs)

    def level(carry: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], None]:
        pairs, first = carry
        start, same = (step[3],), (step[4],)  # both 0
        node, query = unpack(lax.dynamic_slice(pairs, start, (batch,)))
        children = siblings(tree, node, step[0])
        if ahead:
            first = lax.dynamic_update_slice(first, children[0], start)
            children[0] = lax.dynamic_slice(first, same, (batch,))  # XLA would undo a write and a read at `start`
        node, query = _down(children, node, query, bottom[:batch], step[1] > 0, step[2] > 0)
        return (lax.dynamic_update_slice(pairs, pack(node, query), start), first), None

    pairs = pack(jnp.zeros(top.shape, jnp.int32), _scale(top, root(tree)))
    table = np.asarray([(*step, 0, 0) for step in _steps(capacity)], np.int32)
    (pairs, first), _ = control_flow.scan(level, (pairs, lax.real(pairs)), jnp.asarray(table))
    index, leaf = unpack(pairs[:batch])
    if ahead:  # nodes are never negative; without this use XLA merges both kernels of large batches
        index = lax.select(first[:batch] < np.float32(0), jnp.zeros_like(index), index)
    return _inside(index, capacity), leaf


def descend_in_turn(
    tree: Array, uniforms: Callable[[Array], tuple[Array, Array]], number: int, width: int, capacity: int
) -> Array:
    """Return the leaves, and the bits of their indices, complex64[number, width], as `descend`, by one loop of few operations.

    `uniforms(i)` returns those float32[width] of part i, which the loop moves one level down.
    """
    total = root(tree)

    def level(pairs: Array, step: Array) -> tuple[Array, None]:
        part, at_top = step[3], lax.broadcast(step[4] > 0, (width,))
        top, bottom = uniforms(part)
        pair = lax.dynamic_index_in_dim(pairs, part, keepdims=False)
        query = lax.select(at_top, _scale(top, total), lax.real(pair))
        node = lax.bitcast_convert_type(lax.imag(pair), jnp.int32)
        node, query = _down(siblings(tree, node, step[0]), node, query, bottom, step[1] > 0, step[2] > 0)
        pair = lax.complex(query, lax.bitcast_convert_type(_inside(node, capacity), jnp.float32))
        return lax.dynamic_update_slice(pairs, pair[None], (part, jnp.int32(0))), None

    steps = [(*step, i, not depth) for depth, step in enumerate(_steps(capacity)) for i in range(number)]
    pairs = jnp.zeros((number, width), jnp.complex64)
    return control_flow.scan(level, pairs, jnp.asarray(np.asarray(steps, np.int32)))[0]


def _descend_by_level(
    tree: Array, top: Array, bottom: Array, *, batch: int, capacity: int, read: Read, in_halves: bool = False
) -> tuple[Array, Array]:
    """Move all queries down, with the levels unrolled; `in_halves`: XLA fuses each half of them apart, in fewer kernels."""
    node, query = jnp.zeros((batch,), jnp.int32), _scale(top[:batch], root(tree))
    value = query
    for below, at_middle, _ in _steps(capacity):
        node, value, query = _chosen(tree, node, query, np.int32(below), read)
        query = _scale(bottom[:batch], value) if at_middle else query
        if at_middle and in_halves:
            node, query = lax.optimization_barrier((node, query))
    return _inside(node, capacity), value


def _inside(index: Array, capacity: int) -> Array:
    """Clip indices to the leaves: a caller's NaN can break the sums."""
    return jnp.minimum(index, np.int32(capacity - 1))
