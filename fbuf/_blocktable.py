"""A set of blocks on the device: each distinct block once, found by content, counted by references; all of it in jit.

The table is a hash table of M places in buckets of 32. A block may lie in any place of the two buckets its hash names, and
goes to the one with more room, which holds past 90 % of load as a table fills and to 86 % as blocks come and go (buckets
of 16: 84 %). What a fingerprint
promises is compared word for word before it is believed, so equal fingerprints cost time and never give a wrong block.
A place whose count is 0 is free, but keeps its block until somebody needs the place: blocks that come back are found.
Place 0 holds zeros for ever and belongs to no block: id 0 says "nothing here".

New blocks of one call compete for places: each bids for one in a small hash map of bids (linear probing, nothing is ever
taken out of it), the first wins, equal blocks share what one of them won, the others go on to their next free place. Which
places a block tries depends on its content and the table alone, so equal blocks meet.

The loop goes over fixed lots of blocks, as many as there are, and carries the table in place: its reads are pinned before its
writes (`fbuf._pin`), and whether it goes on is decided for all of a `vmap`'s tables at once. (A loop whose condition is
batched selects between the old and the new table every turn: a copy.) Carrying only indices and writing afterwards, the
first plan, needs the writes of all lots at their largest and cannot show a lot what the lot before it added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._config import state
from fbuf._pin import any_of, pin

WAYS = 32
"""Places of a bucket: a bucket's free places are the bits of one word."""


@state
class Table:
    """Distinct blocks and who refers to them."""

    words: jax.Array  # uint32[M, words of a block]; row 0 zeros
    prints: jax.Array  # uint32[M], fingerprint; 0: none
    count: jax.Array  # uint32[M], references; place 0 always has one


def init(places: int, block_words: int) -> Table:
    """An empty table of `places`, a multiple of 32."""
    return Table(
        words=jnp.zeros((places, block_words), jnp.uint32),
        prints=jnp.zeros((places,), jnp.uint32),
        count=jnp.zeros((places,), jnp.uint32).at[0].set(jnp.uint32(1)),
    )


def _odd(seed: int, number: int) -> np.ndarray:
    """Odd uint32 constants, the same everywhere."""
    x = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _mix(x: jax.Array) -> jax.Array:
    """A permutation of uint32 in which every bit of the result depends on every bit of `x` (lowbias32)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def digest(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two 32-bit hashes of each block uint32[A, words]. Tests replace it by worse ones.

    Every word is mixed before it is summed: a plain multiply-and-sum collides on real frames.
    """
    number = blocks.shape[1]
    x = blocks ^ (blocks >> jnp.uint32(15))
    x = x * jnp.asarray(_odd(1, number))[None]
    x = x ^ (x >> jnp.uint32(13))
    first = jnp.sum(x * jnp.asarray(_odd(2, number))[None], axis=1, dtype=jnp.uint32)
    second = jnp.sum(x * jnp.asarray(_odd(3, number))[None], axis=1, dtype=jnp.uint32)
    return _mix(first ^ (second >> jnp.uint32(16))), _mix(second ^ (first << jnp.uint32(7)))


def _buckets(first: jax.Array, second: jax.Array, number: int) -> jax.Array:
    """int32[A, 2], two buckets of each block, different where there are two."""
    one = first % jnp.uint32(number)
    step = jnp.uint32(1) + _mix(second) % jnp.uint32(max(number - 1, 1))
    return jnp.stack([one, (one + step) % jnp.uint32(number)], axis=1).astype(jnp.int32)


def _bits(flags: jax.Array) -> jax.Array:
    """uint32[...] of bool[..., 32]."""
    bits = jnp.where(flags, jnp.uint32(1) << jnp.arange(WAYS, dtype=jnp.uint32), jnp.uint32(0))
    while bits.shape[-1] > 1:  # halves at a time: XLA's sum over a short last axis is one word after another
        half = bits.shape[-1] // 2
        bits = bits[..., :half] | bits[..., half:]
    return bits[..., 0]


def _lowest(bits: jax.Array) -> jax.Array:
    """int32, place of the lowest bit set; 32 where none is."""
    return lax.population_count((bits & (~bits + jnp.uint32(1))) - jnp.uint32(1)).astype(jnp.int32)


def _first_way(bits: jax.Array, bucket: jax.Array) -> jax.Array:
    """Place in the table of the first bit of uint32[A, 2] in buckets int32[A, 2]; 0 where none is set."""
    which = (bits[:, 0] == jnp.uint32(0)).astype(jnp.int32)
    chosen = jnp.where(which == jnp.int32(0), bits[:, 0], bits[:, 1])
    base = jnp.where(which == jnp.int32(0), bucket[:, 0], bucket[:, 1]) * jnp.int32(WAYS)
    return jnp.where(chosen == jnp.uint32(0), jnp.int32(0), base + _lowest(chosen))


def _drop_first(bits: jax.Array) -> jax.Array:
    """Clears the first bit set of uint32[A, 2]."""
    one, two = bits[:, 0], bits[:, 1]
    one_left, two_left = one & (one - jnp.uint32(1)), two & (two - jnp.uint32(1))
    return jnp.stack([one_left, jnp.where(one == jnp.uint32(0), two_left, two)], axis=1)


def _find(table: Table, blocks: jax.Array, matches: jax.Array, bucket: jax.Array) -> jax.Array:
    """int32[A], where each block lies among the places whose fingerprint matches; 0 where it does not."""

    def look(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        bits, found = carry
        way = _first_way(bits, bucket)
        same = jnp.all(table.words.at[way].get(mode="promise_in_bounds") == blocks, axis=1) & (way != jnp.int32(0))
        found = jnp.where(same, way, found)
        return jnp.where(same[:, None], jnp.uint32(0), _drop_first(bits)), found

    start = look((matches, jnp.zeros((blocks.shape[0],), jnp.int32)))
    return lax.while_loop(lambda carry: any_of(carry[0] != jnp.uint32(0)), look, start)[1]


class _Bid(NamedTuple):
    """Where the competition for places stands."""

    active: jax.Array  # bool[A]
    way: jax.Array  # int32[A], place wanted or won; 0: none
    free: jax.Array  # uint32[A, 2], places not yet tried; the fuller bucket second
    probe: jax.Array  # int32[A], steps taken in the map of bids
    won: jax.Array  # bool[A]
    map: jax.Array  # int32[P], item that won here; A: nobody


def _compete(
    blocks: jax.Array,
    hashes: tuple[jax.Array, jax.Array],
    found: jax.Array,
    revived: jax.Array,
    missing: jax.Array,
    free: jax.Array,
    bucket: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Gives every missing block a free place, equal ones the same.

    Args:
      found, revived: int32[A], bool[A]: blocks that lie in a place of no references. They are served first.
    Returns:
      Place of each (0: none was free), and for each place given out the one item that stands for it.
    """
    number = blocks.shape[0]
    size = 1 << max(2 * number - 1, 1).bit_length()
    item = jnp.arange(number, dtype=jnp.int32)
    room = lax.population_count(free)
    swap = room[:, 1] > room[:, 0]
    free = jnp.where(swap[:, None], free[:, ::-1], free)
    bucket = jnp.where(swap[:, None], bucket[:, ::-1], bucket)
    turn = hashes[1] & jnp.uint32(WAYS - 1)  # where in its bucket a block begins, lest all begin at one place

    def rolled(bits: jax.Array, by: jax.Array) -> jax.Array:
        by = by[:, None]
        return (bits >> by) | jnp.where(
            by == jnp.uint32(0), jnp.uint32(0), bits << ((jnp.uint32(32) - by) % jnp.uint32(32))
        )

    free = rolled(free, turn)

    def wanted(bits: jax.Array) -> jax.Array:
        one = bits[:, 0] != jnp.uint32(0)
        place = (_lowest(jnp.where(one, bits[:, 0], bits[:, 1])).astype(jnp.uint32) + turn) & jnp.uint32(WAYS - 1)
        base = jnp.where(one, bucket[:, 0], bucket[:, 1]) * jnp.int32(WAYS)
        some = one | (bits[:, 1] != jnp.uint32(0))
        return jnp.where(some, base + place.astype(jnp.int32), jnp.int32(0))

    # A revived block wants one place from the first round on and beats all others there, so nobody is ever before it.
    order = jnp.where(revived, item - jnp.int32(number), item)

    def bid(now: _Bid) -> _Bid:
        active = now.active
        at = ((_mix(now.way.astype(jnp.uint32)) & jnp.uint32(size - 1)).astype(jnp.int32) + now.probe) & jnp.int32(
            size - 1
        )
        holder = now.map.at[at].get(mode="promise_in_bounds")
        bids = active & (holder == jnp.int32(number))
        map = now.map.at[jnp.where(bids, at, jnp.int32(size))].min(order, mode="drop")
        won = bids & (map.at[at].get(mode="promise_in_bounds") == order)
        held = active & (holder < jnp.int32(number))
        rival = jnp.where(
            held, holder + jnp.where(holder < jnp.int32(0), jnp.int32(number), jnp.int32(0)), jnp.int32(0)
        )
        clash = held & (now.way.at[rival].get(mode="promise_in_bounds") == now.way)
        alike = clash & (hashes[0].at[rival].get(mode="promise_in_bounds") == hashes[0])
        alike = alike & (hashes[1].at[rival].get(mode="promise_in_bounds") == hashes[1])

        def compared() -> jax.Array:
            return jnp.all(blocks.at[rival].get(mode="promise_in_bounds") == blocks, axis=1)

        equal = alike & lax.cond(any_of(alike), compared, lambda: jnp.zeros((number,), bool))
        moves = clash & ~equal
        left = jnp.where(moves[:, None], _drop_first(now.free), now.free)
        way = jnp.where(moves, wanted(left), now.way)
        probe = jnp.where(moves, jnp.int32(0), now.probe + (held & ~clash).astype(jnp.int32))
        still = now.active & ~won & ~equal & ~(moves & (way == jnp.int32(0)))
        return _Bid(still, way, left, probe, now.won | won, map)

    way = jnp.where(missing, wanted(free), found)
    start = _Bid(
        active=(missing & (way != jnp.int32(0))) | revived,
        way=way,
        free=free,
        probe=jnp.zeros((number,), jnp.int32),
        won=jnp.zeros((number,), bool),
        map=jnp.full((size,), number, jnp.int32),
    )
    end = lax.while_loop(lambda now: any_of(now.active), bid, start)
    return end.way, end.won


class Placed(NamedTuple):
    """Where blocks ended up."""

    way: jax.Array  # int32[K], place of each; 0 where the table had none
    won: jax.Array  # bool[K], the block took a place that nobody referred to, and holds it with a count of 1


def insert(
    table: Table,
    fetch: Callable[[jax.Array], jax.Array],
    items: jax.Array,
    number: jax.Array,
    lot: int,
    token: jax.Array,
) -> tuple[Table, Placed, jax.Array]:
    """Finds or adds the first `number` <= K of `items` int32[K]; `fetch` gives the blocks of items.

    Places taken are marked by a count of 1 until `refer` settles who refers to what.

    Cost: O(number), in lots of `lot`; the table is written in place.
    """
    total = items.shape[0]
    places = table.count.shape[0]
    buckets = places // WAYS
    items = jnp.concatenate([items, jnp.zeros((lot,), jnp.int32)])
    nowhere = jnp.arange(lot, dtype=jnp.int32) + jnp.int32(places)

    def step(carry: tuple[jax.Array, Table, Placed, jax.Array]) -> tuple[jax.Array, Table, Placed, jax.Array]:
        begin, table, placed, token = carry
        valid = begin + jnp.arange(lot, dtype=jnp.int32) < number
        blocks = fetch(lax.dynamic_slice(items, (begin,), (lot,)))
        hashes = digest(blocks)
        prints = jnp.maximum(hashes[1], jnp.uint32(1))
        bucket = _buckets(*hashes, buckets)
        matches = _bits(_rows(table.prints, bucket) == prints[:, None, None])
        free = _bits(_rows(table.count, bucket) == jnp.uint32(0))
        matches = jnp.where(valid[:, None], matches, jnp.uint32(0))
        found = _find(table, blocks, matches, bucket)
        token, (found, free) = pin(token, (found, free))
        there = found != jnp.int32(0)
        lies_in = (found // jnp.int32(WAYS))[:, None] == bucket
        bit = jnp.uint32(1) << (found % jnp.int32(WAYS)).astype(jnp.uint32)
        idle = jnp.any(lies_in & ((free & bit[:, None]) != jnp.uint32(0)), axis=1)
        way, won = _compete(blocks, hashes, found, there & idle, valid & ~there, free, bucket)
        at = jnp.where(won, way, nowhere) + token
        table = Table(
            words=table.words.at[at].set(blocks, mode="drop", unique_indices=True),
            prints=table.prints.at[at].set(prints, mode="drop", unique_indices=True),
            count=table.count.at[at].set(jnp.uint32(1), mode="drop", unique_indices=True),
        )
        placed = Placed(
            lax.dynamic_update_slice(placed.way, way, (begin,)), lax.dynamic_update_slice(placed.won, won, (begin,))
        )
        return jnp.minimum(begin + jnp.int32(lot), jnp.int32(total)), table, placed, token

    empty = Placed(jnp.zeros((total + lot,), jnp.int32), jnp.zeros((total + lot,), bool))
    begin = jnp.zeros((), jnp.int32)
    _, table, placed, token = lax.while_loop(
        lambda carry: any_of(carry[0] < number), step, (begin, table, empty, token)
    )
    return table, Placed(placed.way[:total], placed.won[:total]), token


def _rows(array: jax.Array, bucket: jax.Array) -> jax.Array:
    """[A, 2, 32] of the places in buckets int32[A, 2]."""
    return array.reshape(-1, WAYS).at[bucket].get(mode="promise_in_bounds")


CHUNK_ITEMS = 2**15
"""Most blocks `release` and `refer` take at once: what their exact sums in 32 bits allow."""


def release(table: Table, ids: jax.Array, token: jax.Array) -> tuple[Table, jax.Array, jax.Array]:
    """Takes one reference from each of `ids` int32[K] (0 is skipped); also how many blocks nobody refers to any more."""
    before = table.count.at[ids].get(mode="promise_in_bounds")
    token, (before,) = pin(token, (before,))
    real = ids != jnp.int32(0)
    at = jnp.where(real, ids, jnp.int32(table.count.shape[0])) + token
    count = table.count.at[at].add(jnp.uint32(2**32 - 1), mode="drop")
    after = count.at[ids].get(mode="promise_in_bounds")
    token, (after,) = pin(token, (after,))
    # All references of a block that died were among these, so it is met `before` times: each time adds 1 / before.
    gone = real & (after == jnp.uint32(0))
    part = jnp.where(gone, jnp.uint32(2 * CHUNK_ITEMS) // jnp.maximum(before, jnp.uint32(1)), jnp.uint32(0))
    died = (jnp.sum(part, dtype=jnp.uint32) + jnp.uint32(2 * CHUNK_ITEMS - 1)) // jnp.uint32(2 * CHUNK_ITEMS)
    return Table(table.words, table.prints, count), died, token


def refer(
    table: Table, ids: jax.Array, refers: jax.Array, won: jax.Array, token: jax.Array
) -> tuple[Table, jax.Array, jax.Array]:
    """Adds a reference for each of `ids` int32[K] that `refers`, and takes back what `won` places held.

    Returns:
      The table, how many of the places won are referred to now, and the token.
    """
    weight = refers.astype(jnp.uint32) - won.astype(jnp.uint32)
    at = jnp.where(weight != jnp.uint32(0), ids, jnp.int32(table.count.shape[0])) + token
    count = table.count.at[at].add(weight, mode="drop")
    after = count.at[ids].get(mode="promise_in_bounds")
    token, (after,) = pin(token, (after,))
    born = jnp.sum(won & (after != jnp.uint32(0)), dtype=jnp.uint32)
    return Table(table.words, table.prints, count), born, token


@functools.partial(jax.jit, static_argnums=1)
def rebuild(table: Table, places: int) -> tuple[Table, jax.Array, jax.Array]:
    """The blocks that somebody refers to in a table of another size.

    Returns:
      The table, where each place went (int32[M], 0 for those of no references), and how many blocks found no place.
    Cost: O(M).
    """
    total = table.count.shape[0]
    live = (table.count != jnp.uint32(0)).at[0].set(False)
    rank = jnp.cumsum(live, dtype=jnp.int32) - jnp.int32(1)
    iota = jnp.arange(total, dtype=jnp.int32)
    items = jnp.zeros((total,), jnp.int32).at[jnp.where(live, rank, jnp.int32(total))].set(iota, mode="drop")

    def fetch(item: jax.Array) -> jax.Array:
        return table.words.at[item].get(mode="promise_in_bounds")

    empty, token = init(places, table.words.shape[1]), jnp.zeros((), jnp.int32)
    made, placed, _ = insert(empty, fetch, items, rank[-1] + jnp.int32(1), min(total, 4096), token)
    moved = jnp.where(live, placed.way.at[jnp.maximum(rank, 0)].get(mode="promise_in_bounds"), jnp.int32(0))
    lost = jnp.sum(live & (moved == jnp.int32(0)), dtype=jnp.uint32)
    at = jnp.where(moved == jnp.int32(0), jnp.int32(places) + iota, moved)
    count = made.count.at[at].set(table.count, mode="drop", unique_indices=True)
    return Table(made.words, made.prints, count), moved, lost
