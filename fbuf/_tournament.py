"""The rows with the lowest ranks of C, in a tree: what must go when better ones come, in O(log C) a row.

A row of the tree is a few uint32 words that compare like numbers with many digits: the rank, in words that keep its order
(`encode`), then the row's arrival, inverted, so that of equal ranks the newest counts as the lowest, then its slot. A
parent is the lowest of its eight children, so the root is the row that goes next, and names its slot. Layout and fan-out are
those of `fbuf._sumtree`; all words of a node lie side by side.

On CPUs new rows are put in one by one as they come, those that are higher than the lowest there was before: XLA makes one
kernel of a scan over a few of them (0.8 us a row), and the loop around it ends where none is left. Elsewhere all at once: the
lowest K rows are looked for from the top, level by level (of a level's nodes only the lowest K matter), and the i-th highest of
the new takes the place of the i-th lowest if it is higher. Both keep the same rows, in slots of their own choice.

Rejected: a binary heap (three times the levels, and a swap moves two rows); `lax.top_k` over all C ranks (O(C) a write); on
CPUs to sort the new rows first, as it is done elsewhere (a fifth of the time, more than it saves); an array for each word (XLA
copies all of them in every step of the loop: a thousand times the time).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._pin import any_of, pin
from fbuf._sumtree import FAN_OUT, layout
from fbuf._wide import Wide

__all__ = ["decode", "encode", "init", "insert", "lowest", "number_of_words", "root"]

_SIGN = np.uint32(0x80000000)
_NONE = np.uint32(0xFFFFFFFF)  # every word of a slot without a row: higher than any row
_AT_ONCE = 32  # rows of one scan


def number_of_words(dtype: Any) -> int:
    """How many words a rank of this dtype takes: 2 if it has 64 bits, else 1."""
    return 2 if jnp.dtype(dtype).itemsize == 8 else 1


def encode(rank: jax.Array) -> jax.Array:
    """Words uint32[..., W] in the order of ranks [...] of any dtype of real numbers; NaN below all, 0.0 and -0.0 alike."""
    if rank.dtype == jnp.bool_:
        return rank.astype(jnp.uint32)[..., None]
    wide = number_of_words(rank.dtype) == 2
    if jnp.issubdtype(rank.dtype, jnp.floating):
        bits = _halves(rank) if wide else _halves(rank.astype(jnp.float32))
        zero = (bits.high == _SIGN) & (bits.low == jnp.uint32(0))
        bits = Wide(jnp.where(zero, jnp.uint32(0), bits.high), bits.low)
        below = (bits.high & _SIGN) != jnp.uint32(0)
        nan = jnp.isnan(rank)
        high = jnp.where(below, ~bits.high, bits.high | _SIGN)
        low = jnp.where(below, ~bits.low, bits.low)
        bits = Wide(jnp.where(nan, jnp.uint32(0), high), jnp.where(nan, jnp.uint32(0), low))
    elif jnp.issubdtype(rank.dtype, jnp.unsignedinteger):
        bits = _halves(rank) if wide else _halves(rank.astype(jnp.uint32))
    else:
        bits = _halves(rank) if wide else _halves(rank.astype(jnp.int32))
        bits = Wide(bits.high ^ _SIGN, bits.low)
    return jnp.stack(bits if wide else bits[:1], axis=-1)


def _halves(number: jax.Array) -> Wide:
    """High and low word of 64 bits; of 32 the word itself and 0."""
    bits = lax.bitcast_convert_type(number, jnp.uint32)
    return Wide(bits, jnp.zeros_like(bits)) if number.dtype.itemsize == 4 else Wide(bits[..., 1], bits[..., 0])


def decode(words: jax.Array, dtype: Any, nan: jax.Array) -> jax.Array:
    """The rank [...] of words uint32[..., W], and `nan` where it was NaN."""
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


def _number(bits: Wide, dtype: Any, narrow: Any) -> jax.Array:
    """The inverse of `_halves`; a number of 32 bits is `narrow` first."""
    if jnp.dtype(dtype).itemsize == 8:
        return lax.bitcast_convert_type(jnp.stack([bits.low, bits.high], axis=-1), dtype)
    return lax.bitcast_convert_type(bits.high, narrow).astype(dtype)


def root(tree: jax.Array) -> jax.Array:
    """uint32[words + 3], the lowest row; all ones where there is none."""
    return tree[tree.shape[0] - FAN_OUT]


def init(capacity: int, words: int) -> jax.Array:
    """A tree uint32[nodes, words + 3] without rows, for ranks of so many words."""
    return jnp.full((layout(capacity)[1][-1], words + 3), _NONE, jnp.uint32)


def insert(
    tree: jax.Array, capacity: int, rank: jax.Array, arrival: Wide, keep: jax.Array, held: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Puts rows in: into the next empty slot, or else in place of the lowest, if they are higher.

    Args:
      tree: uint32[nodes, words + 3]; written in place when donated or carried by a scan.
      capacity: `C`, static.
      rank: uint32[N, words], from `encode`.
      arrival: uint32[N] twice, increasing.
      keep: bool[N]; the others are left out.
      held: int32[], rows in the tree: those of slots 0 to `held` - 1.
    Returns:
      The tree; and int32[N], the slot of each row, C where it is not kept. A row that had to go again is followed by one with
      its slot.
    Cost: O(N + K log C), K the rows kept; elsewhere than on CPUs O(N log N log C).
    """
    rows = jnp.concatenate([rank, ~arrival.high[:, None], ~arrival.low[:, None]], axis=-1)
    return lax.platform_dependent(
        tree,
        rows,
        keep,
        held,
        cpu=functools.partial(_insert_one_by_one, capacity=capacity),
        default=functools.partial(_insert_at_once, capacity=capacity),
    )


def _less(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """a < b, word by word from the first."""
    less = a[-1] < b[-1]
    for one, other in zip(a[-2::-1], b[-2::-1], strict=True):
        less = (one < other) | ((one == other) & less)
    return less


def _lowest_child(children: jax.Array) -> jax.Array:
    """[..., W], the lowest of eight rows [..., 8, W]. Of scalars: of vectors of words XLA compares once a word.

    No two rows have one arrival, so their slots need not be compared.
    """
    rows = [_words(children[..., k, :]) for k in range(FAN_OUT)]
    while len(rows) > 1:
        pairs = [(a, b, _less(a[:-1], b[:-1])) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        rows = [[jnp.where(less, x, y) for x, y in zip(a, b, strict=True)] for a, b, less in pairs]
    return jnp.stack(rows[0], axis=-1)


def _words(row: jax.Array) -> list[jax.Array]:
    return [row[..., w] for w in range(row.shape[-1])]


def _insert_one_by_one(
    tree: jax.Array, rows: jax.Array, keep: jax.Array, held: jax.Array, *, capacity: int
) -> tuple[jax.Array, jax.Array]:
    counts, offsets = layout(capacity)
    number, width, words = rows.shape[0], tree.shape[1], rows.shape[1] - 2
    step = min(max(number, 2), _AT_ONCE)  # of a loop over one XLA makes no loop, and copies
    room = jnp.int32(capacity) - held
    _, row = pin(held, root(tree))  # it is looked at again after the loop, which writes there
    low = _words(row)
    hopeful = keep & ((room > jnp.int32(0)) | _less(low[:words], _words(rows[:, :words])))
    wanted = jnp.sum(hopeful, dtype=jnp.int32)
    at = jnp.where(hopeful, jnp.cumsum(hopeful, dtype=jnp.int32) - jnp.int32(1), jnp.int32(number + step))
    order = jnp.zeros((number + step,), jnp.int32).at[at].set(lax.iota(jnp.int32, number), mode="drop")

    def put(carry: tuple[jax.Array, jax.Array], given: tuple[jax.Array, jax.Array]) -> Any:
        tree, low = carry
        row, place = given
        empty = place < room
        takes = (place < wanted) & (empty | _less(_words(low[:words]), _words(row[:words])))
        slot = jnp.where(takes, jnp.where(empty, held + place, low[-1].astype(jnp.int32)), jnp.int32(0))
        leaf = jnp.where(takes, jnp.concatenate([row, slot.astype(jnp.uint32)[None]]), _NONE)
        # One that is not taken goes to the padding beside the root, and parents are made of what they were made of.
        where = jnp.where(takes, slot, jnp.int32(offsets[-1] - 1))
        tree = lax.dynamic_update_slice(tree, leaf[None], (where, jnp.int32(0)))
        node, low = slot, leaf
        for level in range(1, len(counts)):
            node = node >> 3
            start = (node * 8 + jnp.int32(offsets[level - 1]), jnp.int32(0))
            low = _lowest_child(lax.dynamic_slice(tree, start, (FAN_OUT, width)))
            tree = lax.dynamic_update_slice(tree, low[None], (node + jnp.int32(offsets[level]), jnp.int32(0)))
        return (tree, low), jnp.where(takes, slot, jnp.int32(capacity))

    def some(carry: tuple[jax.Array, ...]) -> Any:
        first, tree, low, slots = carry
        number_of = lax.dynamic_slice(order, (first,), (step,))
        (tree, low), slot = lax.scan(put, (tree, low), (rows[number_of], first + lax.iota(jnp.int32, step)))
        return first + jnp.int32(step), tree, low, lax.dynamic_update_slice(slots, slot, (first,))

    def more(carry: tuple[jax.Array, ...]) -> jax.Array:
        return any_of(carry[0] < wanted)

    nowhere = jnp.full((number + step,), capacity, jnp.int32)
    start = (jnp.int32(0), tree, row, nowhere)
    _, tree, _, slots = lax.while_loop(more, some, start)
    return tree, jnp.where(hopeful, slots[jnp.minimum(at, jnp.int32(number))], jnp.int32(capacity))


def _insert_at_once(
    tree: jax.Array, rows: jax.Array, keep: jax.Array, held: jax.Array, *, capacity: int
) -> tuple[jax.Array, jax.Array]:
    counts, offsets = layout(capacity)
    number, words = rows.shape[0], rows.shape[1] - 2
    # Those that are left out last, the highest first, of equal ones the first to come.
    inverse = tuple(~rows[:, w] for w in range(words))
    left_out, order = (~keep).astype(jnp.uint32), lax.iota(jnp.int32, number)
    order = lax.sort((left_out, *inverse, order), num_keys=words + 2)[-1]
    rows, wanted = rows[order], jnp.sum(keep, dtype=jnp.int32)
    most = min(number, capacity)
    rows, place = rows[:most], lax.iota(jnp.int32, most)
    room = jnp.int32(capacity) - held
    low = lowest(tree, capacity, most)[jnp.maximum(place - room, jnp.int32(0))]
    empty = place < room
    takes = (place < wanted) & (empty | _less(_words(low[:, :words]), _words(rows[:, :words])))
    slot = jnp.where(takes, jnp.where(empty, held + place, low[:, -1].astype(jnp.int32)), jnp.int32(0))
    leaf = jnp.concatenate([rows, slot.astype(jnp.uint32)[:, None]], axis=-1)
    where = jnp.where(takes, slot, jnp.int32(offsets[-1]) + place)
    tree = tree.at[where].set(leaf, mode="drop", unique_indices=True)
    node = slot
    for level in range(1, len(counts)):
        node = node >> 3
        low = _lowest_child(_children(tree, node, offsets[level - 1]))
        tree = tree.at[node + jnp.int32(offsets[level])].set(low, mode="promise_in_bounds")
    slot = jnp.pad(jnp.where(takes, slot, jnp.int32(capacity)), (0, number - most), constant_values=np.int32(capacity))
    return tree, jnp.zeros((number,), jnp.int32).at[order].set(slot, unique_indices=True)


def _children(tree: jax.Array, node: jax.Array, below: int) -> jax.Array:
    """uint32[K, 8, W]."""
    at = node[:, None] * jnp.int32(8) + jnp.int32(below) + lax.iota(jnp.int32, FAN_OUT)[None, :]
    return tree.at[at].get(mode="promise_in_bounds")


def lowest(tree: jax.Array, capacity: int, number: int) -> jax.Array:
    """uint32[number, words + 3], the lowest rows, lowest first; all ones where there are fewer."""
    counts, offsets = layout(capacity)
    first = next(level for level, count in enumerate(counts) if count <= FAN_OUT * number)
    found = _first(tree[offsets[first] : offsets[first] + counts[first]], number)
    for level in range(first - 1, -1, -1):
        none = found[:, -1] == _NONE
        slot = jnp.where(none, jnp.uint32(0), found[:, -1]).astype(jnp.int32)
        children = _children(tree, slot >> (3 * (level + 1)), offsets[level])
        children = jnp.where(none[:, None, None], _NONE, children)
        found = _first(children.reshape(-1, tree.shape[1]), number)
    return found


def _first(rows: jax.Array, number: int) -> jax.Array:
    """The lowest of rows [M, W], lowest first, padded with all ones."""
    columns = lax.sort(tuple(rows[:, w] for w in range(rows.shape[1])), num_keys=rows.shape[1])
    found = jnp.stack(columns, axis=-1)[:number]
    return jnp.pad(found, ((0, number - found.shape[0]), (0, 0)), constant_values=_NONE)
