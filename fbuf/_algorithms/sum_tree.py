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
  * On CPUs `set` is one loop over the indices, each climbing by itself: XLA makes one kernel of it, and
    the processor overlaps the climbs (a loop for each level took up to 1.5 times as long).
  * On other platforms `set` scatters and gathers by level, which was never timed there.
    `lax.platform_dependent` picks at lowering; both paths do the same arithmetic in the same order.

How leaves are drawn stands in `fbuf._algorithms.sum_tree_draw`.

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

__all__ = ["FAN_OUT", "get", "init", "keep_last", "layout", "nodes", "rebuild", "root", "set", "set_all", "siblings"]


Reduce = Literal["sum", "min", "max"]


FAN_OUT = 8


_MAX_CAPACITY = 2**30  # 8 C / 7 nodes must fit the int32 that indexes them


_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "min": lax.min,
    "max": lax.max,
}


_IDENTITY = {"sum": 0.0, "min": np.inf, "max": -np.inf}


@functools.lru_cache(maxsize=256)
def layout(capacity: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes of each level, and offset of each, then the total; leaves are level 0, the last is the root."""
    if not 1 <= capacity <= _MAX_CAPACITY:
        raise ValueError(
            f"sumtree: capacity is {capacity}; expected 1 to 2**30. Use several buffers, or a smaller capacity=."
        )
    counts = [capacity]
    while counts[-1] > 1 or len(counts) == 1:
        counts.append(-(-counts[-1] // FAN_OUT))
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + -(-count // FAN_OUT) * FAN_OUT)
    return tuple(counts), tuple(offsets)


def nodes(capacity: int) -> int:
    """Returns the number of float32 elements of a tree, about `8 * capacity / 7`."""
    return layout(capacity)[1][-1]


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


def get(tree: jax.Array, index: jax.Array) -> jax.Array:
    """Reads leaves.

    Args:
      tree: float32[nodes(capacity)].
      index: int32[...], each in `[0, capacity)` (not checked).
    Returns:
      float32[...] of the shape of `index`.
    """
    return tree.at[index].get(mode="promise_in_bounds")


def root(tree: jax.Array) -> jax.Array:
    """Returns the sum (min, max) of all leaves, float32[]; it is the first of the last eight."""
    return tree[tree.shape[0] - FAN_OUT]


def rebuild(leaves: jax.Array, *, reduce: Reduce = "sum") -> jax.Array:
    """Makes a tree from all its leaves, one vectorized sweep.

    Args:
      leaves: float32[C].
      reduce: what parents hold of their children.
    Returns:
      float32[nodes(C)], bitwise what `set` of every leaf gives.
    Cost: O(C).
    """
    levels = [_pad(lax.stop_gradient(leaves), reduce)]
    for _ in layout(leaves.shape[0])[0][1:]:
        levels.append(_level_above(levels[-1], reduce=reduce))
    return jnp.concatenate(levels)


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
    _, offsets = layout(capacity)
    first = _first_dense(capacity, index.shape[0])
    swept = []
    for tree, one in zip(trees, reduce, strict=True):
        below = lax.slice(tree, (offsets[first - 1],), (offsets[first],))
        above = jnp.concatenate(_levels_above(below, capacity, first, one))
        swept.append(lax.dynamic_update_slice(tree, above, (np.int32(offsets[first]),)))
    return tuple(swept)


def _combine(children: Sequence[jax.Array], reduce: Reduce) -> jax.Array:
    """Reduces eight siblings, in the one order that `fbuf._algorithms.sum_tree_draw` relies on too."""
    f, c = _COMBINE[reduce], children
    return f(f(f(c[0], c[1]), f(c[2], c[3])), f(f(c[4], c[5]), f(c[6], c[7])))


def _columns(level: jax.Array) -> list[jax.Array]:
    """Splits a padded level into the first, second, ... of every eight siblings."""
    rows = level.reshape(-1, FAN_OUT)
    return [rows[:, k] for k in range(FAN_OUT)]


def _pad(level: jax.Array, reduce: Reduce) -> jax.Array:
    missing = -level.shape[0] % FAN_OUT
    if not missing:
        return level
    return lax.pad(level, np.float32(_IDENTITY[reduce]), [(0, missing, 0)])


@functools.partial(jax.jit, static_argnames="reduce")
def _level_above(level: jax.Array, *, reduce: Reduce) -> jax.Array:
    """The padded level above a padded one. Of eager calls each operation is a program; of all levels in one, XLA works out
    the lower ones again for each upper one."""
    return _pad(_combine(_columns(level), reduce), reduce)


def _levels_above(level: jax.Array, capacity: int, first: int, reduce: Reduce) -> list[jax.Array]:
    """Computes the padded levels from `first` to the root, given the padded one below `first`."""
    counts, _ = layout(capacity)
    levels = []
    for _ in range(first, len(counts)):
        level = _pad(_combine(_columns(level), reduce), reduce)
        levels.append(level)
    return levels


def _first_dense(capacity: int, batch_size: int) -> int:
    """Returns the lowest level with at most a node per index: `set` sweeps it and those above."""
    counts, _ = layout(capacity)
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
    _, offsets = layout(capacity)
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
                children = lax.dynamic_slice(tree, (node * 8 + np.int32(offsets[level - 1]),), (FAN_OUT,))
                value = _combine([children[k] for k in range(FAN_OUT)], one)
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
    _, offsets = layout(capacity)
    position = jnp.where(keep & keep_last(index), index, np.int32(offsets[-1]))
    trees = tuple(tree.at[position].set(leaf, mode="drop") for tree, leaf in zip(trees, leaves, strict=True))
    node = jnp.where(keep, index, np.int32(0))
    for level in range(1, _first_dense(capacity, index.shape[0])):
        node = node >> 3
        # Duplicates write the same value, so their order does not matter.
        trees = tuple(
            tree.at[node + np.int32(offsets[level])].set(
                _combine(siblings(tree, node, offsets[level - 1]), one), mode="promise_in_bounds"
            )
            for tree, one in zip(trees, reduce, strict=True)
        )
    return trees


def siblings(tree: jax.Array, node: jax.Array, below: jax.Array | int) -> list[jax.Array]:
    """Gathers the children, eight of float32[B], of nodes int32[B]; they start at `below`.

    The k-th from the array without its first k elements, so that all eight have one index and one check of it.
    """
    start = (node * 8 + jnp.asarray(below, jnp.int32))[:, None]
    last = tree.shape[0] - FAN_OUT + 1
    one = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return [lax.gather(lax.slice(tree, (k,), (last + k,)), start, one, (1,), mode=mode) for k in range(FAN_OUT)]


def keep_last(index: jax.Array, below: int | None = None) -> jax.Array:
    """Marks the last occurrence of every value.

    Args:
      index: int32[B], any values (also out of range ones: they are compared like the others).
      below: All values are in [0, below), if known.
    Returns:
      bool[B], True where no later element of `index` has the same value.
    Cost: one sort, O(B log B); on CPUs an eighth of the time where value and position fit one word: B `below` <= 2^32.
    Example:
      >>> keep_last(jnp.array([4, 7, 4], jnp.int32))
      Array([False,  True,  True], dtype=bool)
    """
    batch = index.shape[0]
    if batch < 2:
        return jnp.ones((batch,), jnp.bool_)
    if below is not None and below * batch <= 2**32:
        key = lax.sort(index.astype(jnp.uint32) * np.uint32(batch) + lax.iota(np.uint32, batch), is_stable=False)
        value, position = key // np.uint32(batch), key % np.uint32(batch)
    else:
        # Stable: equal values stay in the order they came, so the end of a run is its last occurrence.
        value, position = lax.sort((index, lax.iota(np.int32, batch)), num_keys=1, is_stable=True, dimension=0)
    last = jnp.concatenate([value[1:] != value[:-1], jnp.ones((1,), jnp.bool_)])
    result = jnp.zeros((batch,), jnp.bool_)
    return result.at[position].set(last, unique_indices=True, mode="promise_in_bounds")
