"""Draws leaves of a sum tree (`fbuf._algorithms.sum_tree`) in proportion to their values.

Why this way:
  * Each query takes two uniforms, the second one from a middle level on. One float32 uniform
    has 2^24 values; over a million leaves it fails a chi-square test at 25 million draws. A fresh one
    at every level is as good, costs more bits, and leaves nothing of the strata.
  * All queries go down a level at a time. Each of eight siblings is a gather of its own, from
    the array shifted by its place, so that a level is elementwise arithmetic, one kernel that works on
    eight queries at once: half the time of a loop over the queries. Gathering rows of eight siblings is
    not vectorized (1.6 times as long), writing out all levels takes 2 s to compile, fan-outs of 64 and
    more and a `cumsum` over the leaves also lost.
  * XLA's CPU compiler hands whatever reads a large array to its thread pool, for 32 queries as for
    32,000; a handover costs as much as 100 queries. See `_SPARE` for how small batches avoid it.
  * On other platforms it is written out, for one kernel, which was never timed there.
    `lax.platform_dependent` picks at lowering; both paths do the same arithmetic in the same order.

Source: Schaul et al. 2016, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import random_bits, sum_tree

__all__ = ["draw", "middle", "uniforms"]

_MANY = 8192  # queries that are worth a thread pool
# XLA hands what reads a whole array of more than half a megabyte to its thread pool, for however few queries, unless it
# writes a slice in place; so fewer queries than `_MANY` come with one more, which is not drawn, and are such a slice.
_SPARE = 1


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
    top, bottom = (_unit(words) for words in random_bits.pairs(key, number))
    if stratified:
        stratum = lax.iota(np.int32, number).astype(jnp.float32)
        top = (stratum + top) / np.float32(batch_size)
    return top, bottom


def _unit(words: jax.Array) -> jax.Array:
    """Returns float32 in [0, 1) of 24 bits, as many as it holds exactly; `jax.random.uniform` gives 23."""
    return (words >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-24)


def middle(capacity: int) -> int:
    """Returns the level from which a draw goes on with its second uniform; 0 if never.

    High enough that each uniform chooses among far fewer nodes than its 2^24 values; low enough that
    strata, which only the first one keeps apart, are rarely narrower than the nodes it chooses among.
    """
    counts, _ = sum_tree.layout(capacity)
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
    counts, offsets = sum_tree.layout(capacity)
    half = middle(capacity)
    return tuple((offsets[level], level == half, level == 0) for level in range(len(counts) - 2, -1, -1))


def _down(
    tree: jax.Array,
    node: jax.Array,
    query: jax.Array,
    bottom: jax.Array,
    step: tuple[jax.Array | int, jax.Array | bool, jax.Array | bool],
) -> tuple[jax.Array, jax.Array]:
    """One level down for all queries: the child, and the query in it; at the leaves the leaf in place of the query."""
    below, at_middle, at_leaves = step
    child, value, query = _choose(sum_tree.siblings(tree, node, below), query)
    query = jnp.where(at_middle, _scale(bottom, value), query) if at_middle is not False else query
    query = jnp.where(at_leaves, value, query) if at_leaves is not False else query
    return node * 8 + child, query


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

    start = pack(jnp.zeros(top.shape, jnp.int32), _scale(top, sum_tree.root(tree)))
    table = np.asarray([(*step, 0) for step in _steps(capacity)], np.int32)
    pairs, _ = lax.scan(level, start, jnp.asarray(table))
    index, leaf = unpack(pairs[:batch])
    return _inside(index, capacity), leaf


def _descend_by_level(
    tree: jax.Array, top: jax.Array, bottom: jax.Array, *, batch: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """All queries a level at a time, written out: arithmetic and gathers that one kernel can hold."""
    node, query = jnp.zeros((batch,), jnp.int32), _scale(top[:batch], sum_tree.root(tree))
    for step in _steps(capacity):
        node, query = _down(tree, node, query, bottom[:batch], step)
    return _inside(node, capacity), query


def _inside(index: jax.Array, capacity: int) -> jax.Array:
    """Cannot bind while parents equal the sum of their children; a caller's NaN can make it."""
    return jnp.minimum(index, np.int32(capacity - 1))
