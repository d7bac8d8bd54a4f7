r"""Keep rows in buckets of magnitude, to draw them by rank: O(log C) a change and a draw.

A row belongs to one of 512 *buckets*, by the exponent and the top three mantissa bits of its magnitude, from 2^-32 to 2^32.
Rows of a bucket count as tied and share the mass :math:`\sum_r r^{-\alpha}` of the ranks they fill, which has a closed form
(Euler and Maclaurin). A draw chooses a bucket by a sum tree over the 512 masses, then one of its rows uniformly. Rows are
counted per bucket and block of 512 slots, with a tree of fan-out 8 above: integers, so nothing drifts.

Source: Schaul et al. 2016, section 3.3 and appendix B.2.1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import random, sum_tree
from fbuf._algorithms.sum_tree import keep_last
from fbuf._core.component import state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.slots import Geometry, Ranges, where_written

BUCKETS = 512
_LOWEST = (127 - 32) * 8  # 2^-32: exponent and three bits of mantissa of a float32
_BLOCK = 512  # slots counted together; with 512 buckets the counts take about one int32 a row
_FAN_OUT = 8
_SINGLE = 16  # ranks that are added term by term; beyond, the formula is exact to float32


@state
class Ranks:
    """Hold the bucket of each row, and the number of rows of each bucket."""

    bucket: jax.Array  # uint16[C, rounded up to a block], 1 .. 512, or 0: no row
    total: jax.Array  # int32[512], rows of each bucket
    # int32[512 * nodes], rows in each block and each node above, bucket by bucket; None for one block
    count: Any

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "bucket", self.bucket, 0, BUCKETS


class Table(NamedTuple):
    """Hold the probabilities of the buckets for one alpha."""

    mass: jax.Array  # float32[512], of all rows of a bucket
    each: jax.Array  # float32[512], of one row, as a share of the total
    tree: jax.Array  # float32[nodes(512)], sums of masses


@functools.lru_cache(maxsize=256)
def _levels(capacity: int) -> tuple[int, ...]:
    """Return the offset of each level in a bucket's counts, blocks first, then the total; () for one block."""
    size = -(-capacity // _BLOCK)
    if size == 1:
        return ()
    offsets = [0]
    while True:
        offsets.append(offsets[-1] + -(-size // _FAN_OUT) * _FAN_OUT)
        if size <= _FAN_OUT:
            return tuple(offsets)
        size = -(-size // _FAN_OUT)


def init(capacity: int) -> Ranks:
    """Make an empty table of ranks."""
    nodes = _levels(capacity)[-1] if _levels(capacity) else 0
    if BUCKETS * nodes >= 2**31:
        raise ValueError(f"Ranked: capacity is {capacity}; expected at most about 10^9. Use several buffers.")
    return Ranks(
        bucket=jnp.zeros((-(-capacity // _BLOCK) * _BLOCK,), jnp.uint16),
        total=jnp.zeros((BUCKETS,), jnp.int32),
        count=jnp.zeros((BUCKETS * nodes,), jnp.int32) if nodes else None,
    )


def bucket_of(magnitude: jax.Array) -> jax.Array:
    """Return the bucket, int32 in 1 .. 512, of each magnitude float32 >= 0."""
    bits = lax.bitcast_convert_type(magnitude, jnp.int32) >> jnp.int32(20)
    return jnp.clip(bits - jnp.int32(_LOWEST), jnp.int32(0), jnp.int32(BUCKETS - 1)) + jnp.int32(1)


def lower_edge(bucket: jax.Array) -> jax.Array:
    """Return the least magnitude of each bucket in 1 .. 512, float32. Bucket 1 also holds all smaller magnitudes."""
    bits = (bucket + jnp.int32(_LOWEST - 1)) << jnp.int32(20)
    return lax.bitcast_convert_type(bits, jnp.float32)


def get(ranks: Ranks, slot: jax.Array) -> jax.Array:
    """Return the buckets, int32, of slots in [0, C)."""
    return ranks.bucket.at[slot].get(mode="promise_in_bounds").astype(jnp.int32)


def set(ranks: Ranks, slot: jax.Array, bucket: jax.Array, capacity: int, token: jax.Array) -> Ranks:
    """Move rows int32[A] to buckets int32[A], 0: none. Slots outside [0, C) are skipped; the last of equal slots wins."""
    if slot.shape[0] == 0:
        return ranks
    keep = (slot >= jnp.int32(0)) & (slot < jnp.int32(capacity)) & keep_last(slot)
    token, old = order_after_reads(token, get(ranks, jnp.where(keep, slot, jnp.int32(0))))
    changed = keep & (old != bucket)
    at = where_written(changed, slot, ranks.bucket.shape[0]) + token
    both = jnp.concatenate([jnp.where(changed, old, jnp.int32(0)), jnp.where(changed, bucket, jnp.int32(0))])
    more = jnp.concatenate([jnp.full_like(old, -1), jnp.full_like(old, 1)])
    known = both > jnp.int32(0)
    which = jnp.where(known, both - jnp.int32(1), jnp.int32(BUCKETS))
    count, offsets = ranks.count, _levels(capacity)
    if offsets:
        block = jnp.concatenate([slot, slot]) // jnp.int32(_BLOCK)
        places = []
        for offset in offsets[:-1]:
            place = (both - jnp.int32(1)) * jnp.int32(offsets[-1]) + jnp.int32(offset) + block
            places.append(jnp.where(known, place, jnp.int32(count.shape[0])))
            block = block // jnp.int32(_FAN_OUT)
        count = count.at[jnp.concatenate(places) + token].add(jnp.tile(more, len(places)), mode="drop")
    return Ranks(
        bucket=ranks.bucket.at[at].set(bucket.astype(jnp.uint16), mode="drop", unique_indices=True),
        total=ranks.total.at[which + token].add(more, mode="drop"),
        count=count,
    )


def highest(ranks: Ranks) -> jax.Array:
    """Return the highest bucket with a row, int32[]; 0 if all are empty."""
    return jnp.max(jnp.where(ranks.total > jnp.int32(0), jnp.arange(1, BUCKETS + 1, dtype=jnp.int32), jnp.int32(0)))


def table(ranks: Ranks, alpha: jax.Array) -> Table:
    """Compute the mass of every bucket. O(512)."""
    total = ranks.total
    above = jnp.sum(total, dtype=jnp.int32) - jnp.cumsum(total, dtype=jnp.int32)
    mass = mass_of(above, total, alpha)
    tree = sum_tree.rebuild(mass)
    whole = sum_tree.root(tree)
    share = mass / jnp.maximum(total, jnp.int32(1)).astype(jnp.float32)
    return Table(mass, share / jnp.where(whole > jnp.float32(0), whole, jnp.float32(1)), tree)


def mass_of(above: jax.Array, number: jax.Array, alpha: jax.Array) -> jax.Array:
    r"""Return the sum of :math:`r^{-\alpha}` over the ranks above + 1 .. above + number, float32[K] of int32[K].

    The first ranks are added term by term. The rest is an integral with its first correction, written to avoid cancellation.
    """
    single = jnp.arange(1, _SINGLE + 1, dtype=jnp.int32)
    here = (above[:, None] < single[None, :]) & (single[None, :] <= (above + number)[:, None])
    terms = jnp.power(single.astype(jnp.float32), -alpha)
    # A product: in a sum XLA would compute a power for each element.
    first = jnp.dot(here.astype(jnp.float32), terms, precision=lax.Precision.HIGHEST)
    start = jnp.maximum(above, jnp.int32(_SINGLE))
    length = (jnp.maximum(above + number, jnp.int32(_SINGLE)) - start).astype(jnp.float32)
    begin = start.astype(jnp.float32) + jnp.float32(0.5)
    end = begin + length
    ratio = jnp.log1p(length / begin)
    power = jnp.float32(1) - alpha
    y = power * ratio
    small = jnp.abs(y) < jnp.float32(1e-3)
    series = jnp.float32(1) + y / jnp.float32(2) + y * y / jnp.float32(6)
    growth = jnp.where(small, series, jnp.expm1(y) / jnp.where(small, jnp.float32(1), y))
    integral = jnp.power(begin, power) * ratio * growth
    slope = -alpha - jnp.float32(1)
    second = alpha / jnp.float32(24) * (jnp.power(end, slope) - jnp.power(begin, slope))
    return first + jnp.where(length > jnp.float32(0), jnp.maximum(integral + second, jnp.float32(0)), jnp.float32(0))


def draw(
    ranks: Ranks, now: Table, key: jax.Array, batch_size: int, capacity: int, *, stratified: bool
) -> tuple[jax.Array, jax.Array]:
    """Draw slots int32[B] by rank, and return the probability of each, float32[B]; undefined where there are no rows."""
    choose, within = jax.random.split(key)
    index, _ = sum_tree.draw(now.tree, choose, batch_size, BUCKETS, stratified=stratified)
    nth = random.randint_below(within, (batch_size,), ranks.total[index])
    return nth_of(ranks, index, nth, capacity), now.each[index]


def nth_of(ranks: Ranks, index: jax.Array, nth: jax.Array, capacity: int) -> jax.Array:
    """Return the slots of the `nth` int32[B] rows, in order of slot, of buckets `index` + 1. O(log C)."""
    offsets = _levels(capacity)
    node = jnp.zeros_like(nth)
    for level in range(len(offsets) - 2, -1, -1):
        at = index * jnp.int32(offsets[-1]) + jnp.int32(offsets[level]) + node * jnp.int32(_FAN_OUT)
        counts = jax.vmap(lambda i: lax.dynamic_slice(ranks.count, (i,), (_FAN_OUT,)))(at)
        child, nth = _choose(counts, nth)
        node = node * jnp.int32(_FAN_OUT) + child
    start = node * jnp.int32(_BLOCK)
    wanted = (index + jnp.int32(1)).astype(jnp.uint16)
    slot = start
    for size in (64, 8, 1):  # eighths of the block, then eighths of those

        def members(start: jax.Array, wanted: jax.Array, size: int = size) -> jax.Array:
            same = lax.dynamic_slice(ranks.bucket, (start,), (_FAN_OUT * size,)) == wanted
            return jnp.sum(same.reshape(_FAN_OUT, size), axis=1, dtype=jnp.int32)

        child, nth = _choose(jax.vmap(members)(slot, wanted), nth)
        slot = slot + child * jnp.int32(size)
    return jnp.minimum(slot, jnp.int32(capacity - 1))


def _choose(counts: jax.Array, nth: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which of eight siblings int32[B, 8] contains the nth row, and its position there."""
    upto = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    child = jnp.minimum(jnp.sum(upto <= nth[:, None], axis=1, dtype=jnp.int32), jnp.int32(_FAN_OUT - 1))
    before = jnp.take_along_axis(upto - counts, child[:, None], axis=1)[:, 0]
    return child, nth - before


def grown(ranks: Ranks, capacity: int, number: int) -> Ranks:
    """Copy the rows into a table with room for `number`. Eager, O(C)."""
    more = jnp.zeros((number - capacity,), jnp.uint16)
    return of_buckets(jnp.concatenate([ranks.bucket[:capacity], more]))


@jax.jit
def of_buckets(bucket: jax.Array) -> Ranks:
    """Make a table from the buckets uint16[C] of all rows, 0: none. O(C)."""
    capacity = bucket.shape[0]
    every = jnp.arange(capacity, dtype=jnp.int32)
    return set(init(capacity), every, bucket.astype(jnp.int32), capacity, jnp.zeros((), jnp.int32))
