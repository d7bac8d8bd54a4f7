"""Keep a set of blocks on the device: each distinct block once, found by content, counted by references; all of it in jit.

The table has M places. A clock hand assigns free places in order of arrival, so blocks that arrive together are adjacent, and a
table can be filled to its last place. A block without references keeps its place until the hand reuses it, so it can be found
again. Place 0 holds zeros: id 0 means "no block".

The index is a hash table in buckets of 32 slots. A block has a slot in one of two buckets, with a fingerprint and its place;
matching fingerprints are verified word for word. New blocks of one call bid for slots in a small hash map; equal blocks bid for
the same slots and share one. `insert` loops over chunks of blocks and updates the table in place: reads are pinned before
writes, and the loop condition is reduced over a `vmap`, because XLA copies the table for a batched condition.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.control_flow import any_unbatched, if_any, order_after_reads
from fbuf._core.slots import Geometry, Ranges

WAYS = 32
"""Slots of a bucket, whose free slots are the bits of one word."""


@state
class Table:
    """Hold the distinct blocks, their reference counts, and the index."""

    words: Array  # uint32[M, words of a block]; row 0 zeros
    count: Array  # uint32[M], references; place 0 always has one
    home: Array  # uint32[M], slot that names this place, or named it; 0: none
    prints: Array  # uint32[S], fingerprint of the block named; 0: none
    names: Array  # uint32[S], place of the block; 0: the slot is free
    tally: Array  # uint32[2]: places with references, except place 0; the hand

    def ranges(self, geometry: Geometry) -> Ranges:
        places, slots = self.count.shape[0], self.names.shape[0]
        live = np.count_nonzero(np.asarray(self.count)[1:])
        yield "count", np.asarray(self.count)[:1], 1, 1
        yield "tally", self.tally, np.array([live, 0]), np.array([live, places - 1])
        yield "home", self.home, 0, slots - 1
        yield "names", self.names, 0, places - 1

    @property
    def live(self) -> Array:
        """Return the distinct blocks with references, uint32[]."""
        return self.tally[0]


def init(places: int, block_words: int) -> Table:
    """Make an empty table of M `places`, at least 2."""
    slots = slots_of(places)
    return Table(
        words=jnp.zeros((places, block_words), jnp.uint32),
        count=jnp.zeros((places,), jnp.uint32).at[0].set(jnp.uint32(1)),
        home=jnp.zeros((places,), jnp.uint32),
        prints=jnp.zeros((slots,), jnp.uint32),
        names=jnp.zeros((slots,), jnp.uint32),
        tally=jnp.array([0, 1], jnp.uint32),
    )


def slots_of(places: int) -> int:
    """Return S, the index slots for M places: at most 3 of 4 are ever used.

    At 5 of 6, both buckets of a block are occasionally full.
    """
    return max(2, -(-4 * places // (3 * WAYS))) * WAYS


def _odd(seed: int, number: int) -> np.ndarray:
    """Return fixed odd uint32 constants."""
    x = np.arange(1, number + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _mix(x: Array) -> Array:
    """Mix uint32: every output bit depends on every input bit (lowbias32)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def digest(blocks: Array) -> tuple[Array, Array]:
    """Return two 32-bit hashes of each block uint32[A, words]. Tests replace it by weaker hashes.

    Every word is mixed before the sum: a plain multiply-and-sum collides on real frames.
    """
    number = blocks.shape[1]
    x = blocks ^ (blocks >> jnp.uint32(15))
    x = x * jnp.asarray(_odd(1, number))[None]
    x = x ^ (x >> jnp.uint32(13))
    first = jnp.sum(x * jnp.asarray(_odd(2, number))[None], axis=1, dtype=jnp.uint32)
    second = jnp.sum(x * jnp.asarray(_odd(3, number))[None], axis=1, dtype=jnp.uint32)
    return _mix(first ^ (second >> jnp.uint32(16))), _mix(second ^ (first << jnp.uint32(7)))


def _buckets(first: Array, second: Array, number: int) -> Array:
    """Return the two buckets of each block, int32[A, 2], different if there are two."""
    one = first % jnp.uint32(number)
    step = jnp.uint32(1) + _mix(second) % jnp.uint32(max(number - 1, 1))
    return jnp.stack([one, (one + step) % jnp.uint32(number)], axis=1).astype(jnp.int32)


def _bits(flags: Array) -> Array:
    """Pack bool[..., 32] into uint32[...]."""
    bits = jnp.where(flags, jnp.uint32(1) << jnp.arange(WAYS, dtype=jnp.uint32), jnp.uint32(0))
    while bits.shape[-1] > 1:  # by halves: XLA does not vectorize a sum over a short last axis
        half = bits.shape[-1] // 2
        bits = bits[..., :half] | bits[..., half:]
    return bits[..., 0]


def _lowest(bits: Array) -> Array:
    """Return the index of the lowest set bit, int32; 32 if none is set."""
    return lax.population_count((bits & (~bits + jnp.uint32(1))) - jnp.uint32(1)).astype(jnp.int32)


def _first_way(bits: Array, bucket: Array) -> Array:
    """Return the slot of the first set bit of uint32[A, 2] in buckets int32[A, 2]; 0 if none is set."""
    which = (bits[:, 0] == jnp.uint32(0)).astype(jnp.int32)
    chosen = jnp.where(which == jnp.int32(0), bits[:, 0], bits[:, 1])
    base = jnp.where(which == jnp.int32(0), bucket[:, 0], bucket[:, 1]) * jnp.int32(WAYS)
    return jnp.where(chosen == jnp.uint32(0), jnp.int32(0), base + _lowest(chosen))


def _drop_first(bits: Array) -> Array:
    """Clear the first set bit of uint32[A, 2]."""
    one, two = bits[:, 0], bits[:, 1]
    one_left, two_left = one & (one - jnp.uint32(1)), two & (two - jnp.uint32(1))
    return jnp.stack([one_left, jnp.where(one == jnp.uint32(0), two_left, two)], axis=1)


def _find(table: Table, blocks: Array, matches: Array, bucket: Array) -> tuple[Array, Array]:
    """Return the slot and the place of each block among the slots with its fingerprint, int32[A] twice; 0 if unknown."""
    return control_flow.platform_dependent(
        table.names, table.words, blocks, matches, bucket, gpu=_find_at_once, default=_find_one_by_one
    )


def _find_one_by_one(names: Array, words: Array, blocks: Array, matches: Array, bucket: Array) -> tuple[Array, Array]:
    def look(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        bits, slot, place = carry
        way = _first_way(bits, bucket)
        candidate = names.at[way].get(mode="promise_in_bounds").astype(jnp.int32)
        same = jnp.all(words.at[candidate].get(mode="promise_in_bounds") == blocks, axis=1) & (way != jnp.int32(0))
        left = jnp.where(same[:, None], jnp.uint32(0), _drop_first(bits))
        return left, jnp.where(same, way, slot), jnp.where(same, candidate, place)

    nowhere = jnp.zeros((blocks.shape[0],), jnp.int32)
    start = look((matches, nowhere, nowhere))
    _, slot, place = control_flow.while_loop(lambda carry: any_unbatched(carry[0] != jnp.uint32(0)), look, start)
    return slot, place


def _find_at_once(names: Array, words: Array, blocks: Array, matches: Array, bucket: Array) -> tuple[Array, Array]:
    """Compare with all slots that match: a GPU's host waits for each condition of a loop."""
    bit, both = jnp.arange(WAYS, dtype=jnp.uint32)[None, None], (blocks.shape[0], 2 * WAYS)
    match = (((matches[..., None] >> bit) & jnp.uint32(1)) != jnp.uint32(0)).reshape(both)
    slot = (bucket[..., None] * jnp.int32(WAYS) + bit.astype(jnp.int32)).reshape(both)
    slot = jnp.where(match, slot, jnp.int32(0))
    place = names.at[slot].get(mode="promise_in_bounds").astype(jnp.int32)
    same = jnp.all(words.at[place].get(mode="promise_in_bounds") == blocks[:, None], axis=2) & (slot != jnp.int32(0))
    # A block is in the table once.
    found, found_place = (jnp.max(jnp.where(same, at, jnp.int32(0)), axis=1) for at in (slot, place))
    return found, found_place


class _Bid(NamedTuple):
    """Hold the state of the bidding for slots."""

    active: Array  # bool[A]
    way: Array  # int32[A], slot wanted or won; 0: none
    free: Array  # uint32[A, 2], slots not yet tried; the fuller bucket second
    probe: Array  # int32[A], steps taken in the map of bids
    won: Array  # bool[A]
    map: Array  # int32[P], item that won here; A: none


def _rolled(bits: Array, by: Array) -> Array:
    """Return the words uint32[A, 2] rolled right by so many bits."""
    return (bits >> by[:, None]) | (bits << ((jnp.uint32(32) - by[:, None]) % jnp.uint32(32)))


def _compete(
    blocks: Array, hashes: tuple[Array, Array], found: Array, revived: Array, missing: Array, free: Array, bucket: Array
) -> tuple[Array, Array]:
    """Assign a free slot to every missing block; equal blocks share one.

    Args:
      found: int32[A], slots of the known blocks.
      revived: bool[A], known blocks without references; they are served first.
    Returns:
      The slot of each block (0: none was free), and bool[A], one representative of each assigned slot.
    """
    number = blocks.shape[0]
    size = 1 << max(4 * number - 1, 1).bit_length()
    item = jnp.arange(number, dtype=jnp.int32)
    room = lax.population_count(free)
    swap = room[:, 1] > room[:, 0]
    free = jnp.where(swap[:, None], free[:, ::-1], free)
    bucket = jnp.where(swap[:, None], bucket[:, ::-1], bucket)
    turn = hashes[1] & jnp.uint32(WAYS - 1)  # first slot to try, which spreads the blocks over the bucket

    free = _rolled(free, turn)

    def wanted(bits: Array) -> Array:
        one = bits[:, 0] != jnp.uint32(0)
        place = (_lowest(jnp.where(one, bits[:, 0], bits[:, 1])).astype(jnp.uint32) + turn) & jnp.uint32(WAYS - 1)
        base = jnp.where(one, bucket[:, 0], bucket[:, 1]) * jnp.int32(WAYS)
        some = one | (bits[:, 1] != jnp.uint32(0))
        return jnp.where(some, base + place.astype(jnp.int32), jnp.int32(0))

    # A revived block bids for its own slot from the first round on and beats all others.
    order = jnp.where(revived, item - jnp.int32(number), item)

    def bid(now: _Bid) -> _Bid:
        home = _mix(now.way.astype(jnp.uint32)) & jnp.uint32(size - 1)
        at = (home.astype(jnp.int32) + now.probe) & jnp.int32(size - 1)
        holder = now.map.at[at].get(mode="promise_in_bounds")
        bids = now.active & (holder == jnp.int32(number))
        map = now.map.at[jnp.where(bids, at, jnp.int32(size))].min(order, mode="drop")
        won = bids & (map.at[at].get(mode="promise_in_bounds") == order)
        occupied = now.active & (holder < jnp.int32(number))
        rival = holder % jnp.int32(number)
        clash = occupied & (now.way.at[rival].get(mode="promise_in_bounds") == now.way)
        same_hash = clash & (hashes[0].at[rival].get(mode="promise_in_bounds") == hashes[0])
        same_hash = same_hash & (hashes[1].at[rival].get(mode="promise_in_bounds") == hashes[1])

        def compared() -> Array:
            return jnp.all(blocks.at[rival].get(mode="promise_in_bounds") == blocks, axis=1)

        equal = same_hash & if_any(same_hash, compared, same_hash)
        moves = clash & ~equal
        left = jnp.where(moves[:, None], _drop_first(now.free), now.free)
        way = jnp.where(moves, wanted(left), now.way)
        probe = jnp.where(moves, jnp.int32(0), now.probe + (occupied & ~clash).astype(jnp.int32))
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
    end = control_flow.while_loop(lambda now: any_unbatched(now.active), bid, start)
    return end.way, end.won


def _next_free(count: Array, hand: Array, wanted: Array, most: int) -> tuple[Array, Array]:
    """Return the next `wanted` <= `most` places without references after `hand`; the caller ensures there are enough.

    Returns:
      int32[most] places, and the new hand.
    Cost: at most one pass over the counts.
    """
    places = count.shape[0]
    window = min(places, max(2 * most, 1024))
    offset = jnp.arange(window, dtype=jnp.int32)

    def look(carry: Any) -> Any:
        hand, got, seen, chosen = carry
        first = jnp.minimum(hand, jnp.int32(places - window))
        at = first + offset
        # Skip places before the hand, and places that this call has seen.
        new = (at >= hand) & (at - hand < jnp.int32(places) - seen)
        free = new & (lax.dynamic_slice(count, (first,), (window,)) == jnp.uint32(0))

        def take() -> tuple[Array, Array, Array]:
            rank = got + jnp.cumsum(free, dtype=jnp.int32) - jnp.int32(1)
            taken = free & (rank < wanted)
            last = jnp.max(jnp.where(taken, at, hand))
            now = chosen.at[jnp.where(taken, rank, jnp.int32(most))].set(at, mode="drop")
            total = jnp.minimum(rank[-1] + jnp.int32(1), wanted)
            return now, total, jnp.where(total == wanted, last, first + jnp.int32(window - 1)) + jnp.int32(1)

        now, total, stop = if_any(free, take, (chosen, got, first + jnp.int32(window)))
        stop = jnp.where(got < wanted, stop, hand)  # done: another table of the `vmap` is still searching
        seen = seen + stop - hand
        return jnp.where(stop == jnp.int32(places), jnp.int32(0), stop), total, seen, now

    none = jnp.zeros((), jnp.int32)
    start = (hand, none, none, jnp.zeros((most,), jnp.int32))
    hand, _, _, chosen = control_flow.while_loop(
        lambda carry: any_unbatched((carry[1] < wanted) & (carry[2] < jnp.int32(places))), look, start
    )
    return chosen, hand


def _take_places(count: Array, hand: Array, new: Array, live: Array) -> tuple[Array, Array]:
    """Return a place without references for each new block bool[A], 0 where the table has none, and the hand after them."""
    places = jnp.int32(count.shape[0] - 1)
    rank = jnp.cumsum(new, dtype=jnp.int32) - jnp.int32(1)
    wanted = jnp.minimum(rank[-1] + jnp.int32(1), places - live.astype(jnp.int32))
    chosen, hand = _next_free(count, hand, wanted, new.shape[0])
    taken = chosen.at[jnp.maximum(rank, jnp.int32(0))].get(mode="promise_in_bounds")
    return jnp.where(new & (rank < wanted), taken, jnp.int32(0)), hand


def chunk_size(items: int, places: int) -> int:
    """Return how many blocks to insert at once. Small tables use small chunks: a chunk sees the table before its writes."""
    return min(items, 1024, max(2 * WAYS, places // 16))


class Placed(NamedTuple):
    """Hold the places of inserted blocks."""

    place: Array  # int32[K], place of each; 0 where the table had none
    won: Array  # bool[K], the block took an unreferenced place and holds a provisional reference


def insert(
    table: Table, blocks_of: Callable[[Array], Array], items: Array, number: Array, chunk: int, token: Array
) -> tuple[Table, Placed, Array]:
    """Find or add the first `number` <= K of `items` int32[K], whose blocks `blocks_of` returns.

    New places have a count of 1 until `refer` sets their references.

    Cost: O(number), in chunks of `chunk` blocks, plus the places that the hand passes; the table is written in place.
    """
    total = items.shape[0]
    places, slots = table.count.shape[0], table.names.shape[0]
    items = jnp.concatenate([items, jnp.zeros((chunk,), jnp.int32)])
    iota = jnp.arange(chunk, dtype=jnp.int32)

    def step(carry: tuple[Array, Table, Placed, Array]) -> tuple[Array, Table, Placed, Array]:
        begin, table, placed, token = carry
        valid = begin + iota < number
        blocks = blocks_of(lax.dynamic_slice(items, (begin,), (chunk,)))
        hashes = digest(blocks)
        prints = jnp.maximum(hashes[1], jnp.uint32(1))
        bucket = _buckets(*hashes, slots // WAYS)
        near = _rows(table.prints, bucket)
        matches = jnp.where(valid[:, None], _bits(near == prints[:, None, None]), jnp.uint32(0))
        found, place = _find(table, blocks, matches, bucket)
        is_known = found != jnp.int32(0)
        revived = is_known & (table.count.at[place].get(mode="promise_in_bounds") == jnp.uint32(0))
        missing = valid & ~is_known
        free = _free_slots(table, near, bucket, missing)
        token, (found, place, revived, free) = order_after_reads(token, (found, place, revived, free))
        slot, won = _compete(blocks, hashes, found, revived, missing, free, bucket)

        back = won & revived
        count = _set(table.count, jnp.where(back, place, jnp.int32(places) + iota) + token, jnp.uint32(1))
        live = table.tally[0] + jnp.sum(back, dtype=jnp.uint32)
        new = won & ~revived
        taken, hand = _take_places(count, table.tally[1].astype(jnp.int32), new, live)
        got = taken != jnp.int32(0)
        old = table.home.at[taken].get(mode="promise_in_bounds").astype(jnp.int32)
        old_name = table.names.at[old].get(mode="promise_in_bounds").astype(jnp.int32)
        token, (taken, old, old_name) = order_after_reads(token, (taken, old, old_name))

        at = jnp.where(got, taken, jnp.int32(places) + iota) + token
        # Free the slot of the evicted block if it still names this place, then fill the slots of the winners.
        freed = jnp.where(got & (old_name == taken), old, jnp.int32(slots) + iota) + token
        filled = jnp.where(new, slot, jnp.int32(slots) + iota) + token
        table = Table(
            words=_set(table.words, at, blocks),
            count=_set(count, at, jnp.uint32(1)),
            home=_set(table.home, at, slot.astype(jnp.uint32)),
            prints=_set(_set(table.prints, freed, jnp.uint32(0)), filled, jnp.where(got, prints, jnp.uint32(0))),
            names=_set(_set(table.names, freed, jnp.uint32(0)), filled, taken.astype(jnp.uint32)),
            tally=jnp.stack([live + jnp.sum(got, dtype=jnp.uint32), hand.astype(jnp.uint32)]),
        )
        now = table.names.at[slot].get(mode="promise_in_bounds").astype(jnp.int32)
        place = jnp.where(is_known, place, jnp.where(missing, now, jnp.int32(0)))
        token, (place,) = order_after_reads(token, (place,))
        found_now = Placed(place, back | got)
        placed = jax.tree.map(lambda all, now: lax.dynamic_update_slice(all, now, (begin,)), placed, found_now)
        return jnp.minimum(begin + jnp.int32(chunk), jnp.int32(total)), table, placed, token

    empty = Placed(jnp.zeros((total + chunk,), jnp.int32), jnp.zeros((total + chunk,), bool))
    _, table, placed, token = control_flow.while_loop(
        lambda carry: any_unbatched(carry[0] < number), step, (jnp.zeros((), jnp.int32), table, empty, token)
    )
    return table, Placed(placed.place[:total], placed.won[:total]), token


def _set(array: Array, at: Array, values: Array) -> Array:
    """Write at distinct indices; indices past the end are dropped."""
    return array.at[at].set(values, mode="drop", unique_indices=True)


def _free_slots(table: Table, prints: Array, bucket: Array, missing: Array) -> Array:
    """Return the free slots uint32[A, 2] in buckets int32[A, 2]; if they are few, also the slots of unreferenced blocks.

    Few means fewer than 4, or than three times the blocks of this call that two buckets receive on average.
    """
    free = _bits(prints == jnp.uint32(0))
    free = jnp.where(bucket == jnp.int32(0), free & jnp.uint32(2**32 - 2), free)
    few = max(4, 6 * bucket.shape[0] * WAYS // table.names.shape[0])
    needs_eviction = missing & (jnp.sum(lax.population_count(free), axis=1, dtype=jnp.uint32) < jnp.uint32(few))

    def idle() -> Array:
        names = _rows(table.names, bucket).astype(jnp.int32)
        unused = table.count.at[names].get(mode="promise_in_bounds") == jnp.uint32(0)
        return jnp.where(needs_eviction[:, None], free | _bits(unused), free)

    return if_any(needs_eviction, idle, free)


def _rows(array: Array, bucket: Array) -> Array:
    """Return the slots [A, 2, 32] of buckets int32[A, 2]."""
    return control_flow.platform_dependent(array, bucket, cpu=_lines, gpu=_lines, default=_elements)


def _lines(array: Array, bucket: Array) -> Array:
    return array.reshape(-1, WAYS).at[bucket].get(mode="promise_in_bounds")


def _elements(array: Array, bucket: Array) -> Array:
    """Read slot by slot: a TPU copies the array for lines of 32, which it pads to 128."""
    slot = bucket[..., None] * jnp.int32(WAYS) + jnp.arange(WAYS, dtype=jnp.int32)[None, None]
    return array.at[slot].get(mode="promise_in_bounds")


CHUNK_ITEMS = 2**15
"""Most blocks of one `release`: its sum is exact in 32 bits."""


def release(table: Table, ids: Array, token: Array) -> tuple[Table, Array]:
    """Remove one reference from each of `ids` int32[K]; 0 is skipped."""
    before = table.count.at[ids].get(mode="promise_in_bounds")
    token, (before,) = order_after_reads(token, (before,))
    real = ids != jnp.int32(0)
    at = jnp.where(real, ids, jnp.int32(table.count.shape[0])) + token
    count = table.count.at[at].add(jnp.uint32(2**32 - 1), mode="drop")
    after = count.at[ids].get(mode="promise_in_bounds")
    token, (after,) = order_after_reads(token, (after,))
    # A block that died occurs `before` times among `ids`, so each occurrence adds 1 / before.
    gone = real & (after == jnp.uint32(0))
    part = jnp.where(gone, jnp.uint32(2 * CHUNK_ITEMS) // jnp.maximum(before, jnp.uint32(1)), jnp.uint32(0))
    died = (jnp.sum(part, dtype=jnp.uint32) + jnp.uint32(2 * CHUNK_ITEMS - 1)) // jnp.uint32(2 * CHUNK_ITEMS)
    return dataclasses.replace(table, count=count, tally=table.tally.at[0].add(jnp.uint32(0) - died)), token


def refer(table: Table, ids: Array, refers: Array, won: Array, token: Array) -> tuple[Table, Array]:
    """Add a reference to each of `ids` int32[K] where `refers`, and remove the provisional one where `won`."""
    weight = refers.astype(jnp.uint32) - won.astype(jnp.uint32)
    at = jnp.where(weight != jnp.uint32(0), ids, jnp.int32(table.count.shape[0])) + token
    count = table.count.at[at].add(weight, mode="drop")
    after = count.at[ids].get(mode="promise_in_bounds")
    token, (after,) = order_after_reads(token, (after,))
    stillborn = jnp.sum(won & (after == jnp.uint32(0)), dtype=jnp.uint32)
    return dataclasses.replace(table, count=count, tally=table.tally.at[0].add(jnp.uint32(0) - stillborn)), token


def forget(table: Table) -> Table:
    """Remove all references; the blocks stay until their places are reused."""
    count = jnp.zeros_like(table.count).at[0].set(jnp.uint32(1))
    return dataclasses.replace(table, count=count, tally=table.tally.at[0].set(jnp.uint32(0)))


@functools.partial(jax.jit, static_argnums=1)
def rebuild(table: Table, places: int) -> tuple[Table, Array, Array]:
    """Move the referenced blocks, in order of arrival, to a table of another size.

    Returns:
      The table, the new place of each old one (int32[M], 0 if unreferenced), and the number of blocks that did not fit.
    Cost: O(M).
    """
    total = table.count.shape[0]
    live = (table.count != jnp.uint32(0)).at[0].set(False)
    iota = jnp.arange(total, dtype=jnp.int32)
    oldest_first = (iota + table.tally[1].astype(jnp.int32)) % jnp.int32(total)
    is_live = live.at[oldest_first].get(mode="promise_in_bounds")
    rank = jnp.cumsum(is_live, dtype=jnp.int32) - jnp.int32(1)
    items = jnp.zeros((total,), jnp.int32).at[jnp.where(is_live, rank, jnp.int32(total))].set(oldest_first, mode="drop")

    def blocks_of(item: Array) -> Array:
        return table.words.at[item].get(mode="promise_in_bounds")

    number = rank[-1] + jnp.int32(1)
    token = jnp.minimum(number, jnp.int32(0))  # 0, hidden from XLA (`fbuf._core.control_flow`)
    made, placed, _ = insert(
        init(places, table.words.shape[1]), blocks_of, items, number, chunk_size(total, places), token
    )
    inside = jnp.where(iota < number, items, jnp.int32(total) + iota)
    moved = jnp.zeros((total,), jnp.int32).at[inside].set(placed.place, mode="drop", unique_indices=True)
    lost = jnp.sum(live & (moved == jnp.int32(0)), dtype=jnp.uint32)
    at = jnp.where(moved == jnp.int32(0), jnp.int32(places) + iota, moved)
    count = made.count.at[at].set(table.count, mode="drop", unique_indices=True)
    return dataclasses.replace(made, count=count), moved, lost
