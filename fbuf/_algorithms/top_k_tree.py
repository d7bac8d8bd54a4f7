"""Keep the C rows with the highest ranks in a tree whose root is the lowest row: O(log C) a row.

A row is a few uint32 words compared from the first: the rank in order-preserving words (`encode`), the inverted arrival, so
that of equal ranks the newest is the lowest, then the slot. A parent is the lowest of its eight children. Layout and fan-out
are those of `fbuf._algorithms.sum_tree`; all words of a node are adjacent.

On CPUs rows are inserted one by one. XLA makes one kernel of the loop while its body reads and writes less than about 1 KB, so
eight children are compared in one `lax.reduce`, and the trees of a `vmap` are processed one after another. Elsewhere the lowest
K rows are searched level by level, and the i-th highest new row replaces the i-th lowest if it is higher.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms.sum_tree import FAN_OUT, layout
from fbuf._algorithms.uint64 import Wide
from fbuf._core import control_flow
from fbuf._core.control_flow import any_unbatched, order_after_reads

_SIGN = np.uint32(0x80000000)
NONE = np.uint32(0xFFFFFFFF)  # every word of an empty slot: higher than any row


def number_of_words(dtype: Any) -> int:
    """Return the number of words of a rank: 2 for 64-bit dtypes, else 1."""
    return 2 if jnp.dtype(dtype).itemsize == 8 else 1


def encode(rank: Array) -> Array:
    """Encode real ranks [...] as order-preserving words uint32[..., W]; NaN is the lowest, and 0.0 equals -0.0."""
    if rank.dtype == jnp.bool_:
        return rank.astype(jnp.uint32)[..., None]
    is_64_bit = number_of_words(rank.dtype) == 2
    floating, unsigned = (jnp.issubdtype(rank.dtype, kind) for kind in (jnp.floating, jnp.unsignedinteger))
    narrow = jnp.float32 if floating else jnp.uint32 if unsigned else jnp.int32
    bits = _halves(rank if is_64_bit else rank.astype(narrow))
    if floating:
        zero = (bits.high == _SIGN) & (bits.low == jnp.uint32(0))
        bits = Wide(jnp.where(zero, jnp.uint32(0), bits.high), bits.low)
        negative, nan = (bits.high & _SIGN) != jnp.uint32(0), jnp.isnan(rank)
        high = jnp.where(negative, ~bits.high, bits.high | _SIGN)
        low = jnp.where(negative, ~bits.low, bits.low)
        bits = Wide(jnp.where(nan, jnp.uint32(0), high), jnp.where(nan, jnp.uint32(0), low))
    elif not unsigned:
        bits = Wide(bits.high ^ _SIGN, bits.low)
    return jnp.stack(bits if is_64_bit else bits[:1], axis=-1)


def _halves(number: Array) -> Wide:
    """Return the high and low word of 64 bits; of 32 bits the word and 0."""
    bits = lax.bitcast_convert_type(number, jnp.uint32)
    return Wide(bits, jnp.zeros_like(bits)) if number.dtype.itemsize == 4 else Wide(bits[..., 1], bits[..., 0])


def decode(words: Array, dtype: Any, nan: Array) -> Array:
    """Decode words uint32[..., W] to ranks [...], with `nan` in place of NaN."""
    if jnp.dtype(dtype) == jnp.bool_:
        return words[..., 0] != jnp.uint32(0)
    bits = Wide(words[..., 0], words[..., -1])
    if jnp.issubdtype(dtype, jnp.floating):
        missing = jnp.all(words == jnp.uint32(0), axis=-1)
        below = (bits.high & _SIGN) == jnp.uint32(0)
        high = jnp.where(below, ~bits.high, bits.high & ~_SIGN)
        rank = _number(Wide(high, jnp.where(below, ~bits.low, bits.low)), dtype, jnp.float32)
        return jnp.where(missing, nan, rank)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return _number(bits, dtype, jnp.uint32)
    return _number(Wide(bits.high ^ _SIGN, bits.low), dtype, jnp.int32)


def _number(bits: Wide, dtype: Any, narrow: Any) -> Array:
    """Invert `_halves`; 32-bit numbers are read as `narrow` first."""
    if jnp.dtype(dtype).itemsize == 8:
        return lax.bitcast_convert_type(jnp.stack([bits.low, bits.high], axis=-1), dtype)
    return lax.bitcast_convert_type(bits.high, narrow).astype(dtype)


def root(tree: Array) -> Array:
    """Return the lowest row, uint32[words + 3]; all ones in an empty tree."""
    return tree[tree.shape[0] - FAN_OUT]


def init(capacity: int, words: int) -> Array:
    """Make an empty tree uint32[nodes, words + 3] for ranks of `words` words."""
    return jnp.full((layout(capacity)[1][-1], words + 3), NONE, jnp.uint32)


class Inserted(NamedTuple):
    """What an insert of N rows did."""

    tree: Array  # uint32[nodes, words + 3]
    slot: Array  # int32[N]; C for rows that are not kept. Rows evicted within the call share theirs with a later row
    before: Array  # uint32[N, words + 3], the row that each replaced, for `undo`


def insert(tree: Array, capacity: int, rank: Array, arrival: Wide, keep: Array, count: Array) -> Inserted:
    """Insert rows: into the next empty slot, or in place of the lowest row if they are higher.

    Args:
      tree: uint32[nodes, words + 3]; written in place when donated or carried by a scan.
      capacity: `C`, static.
      rank: uint32[N, words], from `encode`.
      arrival: uint32[N] twice, increasing.
      keep: bool[N]; the other rows are skipped.
      count: int32[], rows in the tree, in slots 0 to `count` - 1.
    Cost: O(N + K log C) for K kept rows; on accelerators O(N log N log C).
    """
    rows = jnp.concatenate([rank, ~arrival.high[:, None], ~arrival.low[:, None]], axis=-1)
    one_by_one, at_once = (functools.partial(f, capacity=capacity) for f in (_insert_one_by_one, _insert_at_once))
    return Inserted(*control_flow.platform_dependent(tree, rows, keep, count, cpu=one_by_one, default=at_once))


def undo(done: Inserted, capacity: int, wanted: Array) -> Array:
    """Return the tree as it was before an insert if `wanted` bool[], else as it is. Cost: O(N log C) if wanted."""
    number, levels = done.slot.shape[0], jnp.int32(len(layout(capacity)[0]) - 1)

    def put_back(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        left, tree = carry
        at = left - jnp.int32(1)  # the last first: a slot may have changed twice
        slot = done.slot[at]
        inside = slot < jnp.int32(capacity)
        where = jnp.where(inside, slot, jnp.int32(tree.shape[0] - 1))  # beside the root
        tree = lax.dynamic_update_slice(tree, jnp.where(inside, done.before[at], NONE)[None], (where, jnp.int32(0)))
        slot, up = (jnp.where(inside, x, jnp.int32(0)) for x in (slot, levels))
        return at, _climb(tree, slot, up, jnp.int32(0), tree[0], capacity)[0]

    start = (jnp.where(wanted, jnp.int32(number), jnp.int32(0)), done.tree)
    return control_flow.while_loop(lambda carry: any_unbatched(carry[0] > jnp.int32(0)), put_back, start)[1]


def _climb(tree: Array, slot: Array, levels: Array, base: Array, low: Array, capacity: int) -> tuple[Array, Array]:
    """Recompute the ancestors of a slot on `levels` int32[]; return the tree, which begins at node `base` int32[], and the
    last of them: the root, or `low` where there are no levels.
    """
    level_at = jnp.asarray(layout(capacity)[1], jnp.int32)

    def rise(carry: tuple[Array, ...]) -> Any:
        level, node, tree, _ = carry
        node, above = node >> 3, level + jnp.int32(1)
        start = (base + node * jnp.int32(FAN_OUT) + level_at[level], jnp.int32(0))
        low = _lowest_child(lax.dynamic_slice(tree, start, (FAN_OUT, tree.shape[1])))
        tree = lax.dynamic_update_slice(tree, low[None], (base + node + level_at[above], jnp.int32(0)))
        return above, node, tree, low

    start = (jnp.int32(0), slot, tree, low)
    _, _, tree, low = control_flow.while_loop(lambda carry: any_unbatched(carry[0] < levels), rise, start)
    return tree, low


def _less(a: Sequence[Array], b: Sequence[Array]) -> Array:
    """Compare a < b word by word from the first."""
    less = a[-1] < b[-1]
    for one, other in zip(a[-2::-1], b[-2::-1], strict=True):
        less = (one < other) | ((one == other) & less)
    return less


def _lowest_child(children: Array) -> Array:
    """Return the lowest of eight rows, [..., W] of [..., 8, W]. Arrivals differ, so slots are not compared."""

    def lower(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        less = _less(a[:-1], b[:-1])
        return tuple(jnp.where(less, x, y) for x, y in zip(a, b, strict=True))

    words = _words(children)
    return jnp.stack(lax.reduce(words, [NONE] * len(words), lower, (words[0].ndim - 1,)), axis=-1)


def _words(row: Array) -> list[Array]:
    return [row[..., w] for w in range(row.shape[-1])]


def _insert_one_by_one(tree: Array, rows: Array, keep: Array, count: Array, *, capacity: int) -> Any:
    return _sequential_insert(capacity)(tree, rows, keep, count)


@functools.lru_cache(maxsize=256)
def _sequential_insert(capacity: int) -> Any:
    """Return the sequential insert; under `vmap` it processes the trees one after another, which keeps one kernel."""

    @jax.custom_batching.custom_vmap
    def insert(tree: Array, rows: Array, keep: Array, count: Array) -> tuple[Array, Array, Array]:
        tree, slot, before = _put_all(tree[None], rows[None], keep[None], count[None], capacity)
        return tree[0], slot[0], before[0]

    @insert.def_vmap
    def insert_each(size: int, batched: Sequence[bool], *args: Array) -> Any:
        each = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(args, batched, strict=True)
        ]
        return _put_all(each[0], each[1], each[2], each[3], capacity), (True, True, True)

    return insert


def _put_all(trees: Array, rows: Array, keep: Array, count: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Insert into each of M trees [M, nodes, W], row by row; see `Inserted`."""
    counts, offsets = layout(capacity)
    (members, number), width, words = keep.shape, trees.shape[2], rows.shape[2] - 2
    if members * offsets[-1] >= 2**31:
        raise ValueError(f"TopK: vmap of {members} times {capacity} rows exceeds 2**31 nodes. Use jax.lax.map.")
    if number == 1:  # XLA copies the tree in a loop over one row
        rows, keep = jnp.concatenate([rows, rows], axis=1), jnp.pad(keep, ((0, 0), (0, 1)))
    # The roots are read before the loop writes them.
    _, roots = order_after_reads(jnp.min(count), trees[:, offsets[-1] - FAN_OUT])
    tree = trees.reshape(-1, width)

    def put(carry: tuple[Array, ...], inputs: tuple[Array, ...]) -> Any:
        tree, low, full = carry
        row, keep, at = inputs
        base = jnp.int32(0)
        if members > 1:
            member = at // jnp.int32(rows.shape[1])
            first, base = at % jnp.int32(rows.shape[1]) == jnp.int32(0), member * jnp.int32(offsets[-1])
            low, full = jnp.where(first, roots[member], low), jnp.where(first, count[member], full)
        empty = full < jnp.int32(capacity)
        takes = keep & (empty | _less(_words(low[:words]), _words(row[:words])))
        slot = jnp.where(takes, jnp.where(empty, full, low[-1].astype(jnp.int32)), jnp.int32(0))
        leaf = jnp.where(takes, jnp.concatenate([row, slot.astype(jnp.uint32)[None]]), NONE)
        # A row that is not taken writes the padding beside the root.
        where = jnp.where(takes, slot, jnp.int32(offsets[-1] - 1))
        tree = lax.dynamic_update_slice(tree, leaf[None], (base + where, jnp.int32(0)))
        levels = jnp.where(takes, jnp.int32(len(counts) - 1), jnp.int32(0))
        before = jnp.where(empty, NONE, low)
        tree, low = _climb(tree, slot, levels, base, low, capacity)
        full = full + (takes & empty).astype(jnp.int32)
        return (tree, low, full), (jnp.where(takes, slot, jnp.int32(capacity)), before)

    inputs = (rows.reshape(-1, rows.shape[2]), keep.reshape(-1), lax.iota(jnp.int32, keep.size))
    (tree, _, _), (slot, before) = control_flow.scan(put, (tree, roots[0], count[0]), inputs)
    before = before.reshape(*keep.shape, width)
    return tree.reshape(trees.shape), slot.reshape(keep.shape)[:, :number], before[:, :number]


def _insert_at_once(
    tree: Array, rows: Array, keep: Array, count: Array, *, capacity: int
) -> tuple[Array, Array, Array]:
    counts, offsets = layout(capacity)
    number, words = rows.shape[0], rows.shape[1] - 2
    # Sort skipped rows last, others by descending rank; ties keep the order of arrival.
    inverse = tuple(~rows[:, w] for w in range(words))
    left_out, order = (~keep).astype(jnp.uint32), lax.iota(jnp.int32, number)
    order = lax.sort((left_out, *inverse, order), num_keys=words + 2)[-1]
    rows, wanted = rows[order], jnp.sum(keep, dtype=jnp.int32)
    most = min(number, capacity)
    rows, place = rows[:most], lax.iota(jnp.int32, most)
    room = jnp.int32(capacity) - count
    low = first = lowest(tree, capacity, most)[jnp.maximum(place - room, jnp.int32(0))]
    empty = place < room
    takes = (place < wanted) & (empty | _less(_words(low[:, :words]), _words(rows[:, :words])))
    slot = jnp.where(takes, jnp.where(empty, count + place, low[:, -1].astype(jnp.int32)), jnp.int32(0))
    leaf = jnp.concatenate([rows, slot.astype(jnp.uint32)[:, None]], axis=-1)
    where = jnp.where(takes, slot, jnp.int32(offsets[-1]) + place)
    tree = tree.at[where].set(leaf, mode="drop", unique_indices=True)
    node = slot
    for level in range(1, len(counts)):
        node = node >> 3
        low = _lowest_child(_children(tree, node, offsets[level - 1]))
        tree = tree.at[node + jnp.int32(offsets[level])].set(low, mode="promise_in_bounds")
    slot = jnp.pad(jnp.where(takes, slot, jnp.int32(capacity)), (0, number - most), constant_values=np.int32(capacity))
    before = jnp.pad(jnp.where(empty[:, None], NONE, first), ((0, number - most), (0, 0)))
    return (
        tree,
        jnp.zeros((number,), jnp.int32).at[order].set(slot, unique_indices=True),
        jnp.zeros((number, tree.shape[1]), jnp.uint32).at[order].set(before, unique_indices=True),
    )


def _children(tree: Array, node: Array, below: int) -> Array:
    """Gather the children uint32[K, 8, W] of nodes."""
    at = node[:, None] * jnp.int32(8) + jnp.int32(below) + lax.iota(jnp.int32, FAN_OUT)[None, :]
    return tree.at[at].get(mode="promise_in_bounds")


def lowest(tree: Array, capacity: int, number: int) -> Array:
    """Return the lowest rows uint32[number, words + 3] in order, padded with all ones."""
    counts, offsets = layout(capacity)
    first = next(level for level, count in enumerate(counts) if count <= FAN_OUT * number)
    found = _first(tree[offsets[first] : offsets[first] + counts[first]], number)
    for level in range(first - 1, -1, -1):
        none = found[:, -1] == NONE
        slot = jnp.where(none, jnp.uint32(0), found[:, -1]).astype(jnp.int32)
        children = _children(tree, slot >> (3 * (level + 1)), offsets[level])
        children = jnp.where(none[:, None, None], NONE, children)
        found = _first(children.reshape(-1, tree.shape[1]), number)
    return found


def _first(rows: Array, number: int) -> Array:
    """Return the lowest of rows [M, W] in order, padded with all ones."""
    columns = lax.sort(tuple(rows[:, w] for w in range(rows.shape[1])), num_keys=rows.shape[1])
    found = jnp.stack(columns, axis=-1)[:number]
    return jnp.pad(found, ((0, number - found.shape[0]), (0, 0)), constant_values=NONE)
