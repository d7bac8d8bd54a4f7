r"""Draw a batch from all shards, with probabilities and weights of the whole.

A shard's share of all draws is :math:`g_s = M_s / M`, by the mass of its anchors. A row that its shard draws with probability
:math:`P_s(i)` has probability :math:`P(i) = g_s P_s(i)`.

With draw="local" every shard draws B / D of its own rows whatever its share, so each row has the weight :math:`D g_s` times
the weight of an unsharded draw: the weighted mean of a batch estimates the same.

With draw="global" shards draw in proportion to their mass, and rows are moved to the devices. The shards' numbers of rows in a
batch follow from one random number that all shards know, as the batch of one buffer would have them:
:math:`\lfloor B \sum_{r \le s} g_r + u \rfloor` differences if the sampler is stratified, multinomial otherwise. Row p of the
batch is sent to device p mod D, so all blocks of the `all_to_all` have equal sizes. A shard sends a quarter more than B / D
rows at once; if its mass is larger, the exchange is repeated.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import random
from fbuf._buffer import read
from fbuf._buffer.state import BufferState, anchor_set, count_up
from fbuf._core import control_flow
from fbuf._core.sample import Index, Sample
from fbuf._core.slots import expand, sum_of_lanes
from fbuf._interfaces.sampler import AnchorSet, Draw
from fbuf._members import quota, weights
from fbuf.samplers._base import masked_draw
from fbuf.sharded import _blocks
from fbuf.sharded._operation import operation, same, split


class Whole(NamedTuple):
    """What every shard knows of all of them."""

    share: jax.Array  # float32[D], of each shard in draws of the whole
    number: jax.Array  # float32[], anchors of all shards
    least: jax.Array  # float32[D], the least probability of a row that weights are normalised by; -1: none


def gather(sharded: Any, local: jax.Array) -> jax.Array:
    """Return float32[D, K] of the numbers float32[K] of every shard. One `psum`, whose result is the same on all."""
    shards = sharded.shards
    mine = lax.iota(np.int32, shards)[:, None] == lax.axis_index(sharded.axis)
    return lax.psum(jnp.where(mine, local[None, :], jnp.float32(0)), sharded.axis)


def whole(sharded: Any, local: BufferState, anchors: AnchorSet, drawn: Draw | None = None) -> Whole:
    """Return the shares of all shards; by their numbers of anchors if nothing has mass.

    `least` is of all rows; if weights are normalised by the batch, of those that each shard has `drawn`.
    """
    number = sum_of_lanes(anchors.counts).astype(jnp.float32)
    mass = sharded.shard.sampler.mass(local.sampler, anchors)
    of_batch = drawn is not None and normalize_of(sharded) == "batch"
    if of_batch:
        assert drawn is not None
        mass = mass._replace(least=jnp.min(jnp.where(drawn.mask, drawn.probability, jnp.float32(jnp.inf))))
    total, unit, least, number = gather(sharded, jnp.stack([*mass, number])).T
    share, of_all = weights.by_mass(total, unit, least, number)
    return Whole(share, jnp.sum(number), weights.least_drawn(share, least) if of_batch else of_all)


def normalize_of(sharded: Any) -> str | None:
    """Return what weights are divided by the largest of."""
    return sharded.shard.sampler.normalize


def of_whole(sharded: Any, local: BufferState, every: Whole, drawn: Draw, beta: jax.Array | None) -> Draw:
    """Return a shard's draw with the probabilities and weights of the whole, masked if its share is 0."""
    shards, share = sharded.shards, every.share[lax.axis_index(sharded.axis)]
    mask = drawn.mask & (share > jnp.float32(0))
    chance = drawn.probability * share
    factor = jnp.float32(shards) * share
    weight = jnp.where(mask, factor, jnp.float32(0))
    if sharded.shard.sampler.prioritized:
        factors = jnp.float32(shards) * every.share
        beta = local.sampler.beta if beta is None else beta
        weight = weigh(sharded, every, chance, mask, beta, factor, factors)
    return masked_draw(drawn.slot, chance, mask, sharded.shard.geometry, weight)


def weigh(
    sharded: Any, every: Whole, chance: jax.Array, mask: jax.Array, beta: jax.Array, factor: Any, factors: Any
) -> jax.Array:
    r"""Return :math:`f (N P(i))^{-\beta}`, normalised as the sampler says, 0 where `mask` is False.

    Args:
      chance: float32[B / D], P of this shard's rows.
      factor: float32[], f of this shard's rows.
      factors: float32[D], f of each shard's rows; None: 1, and the rows drawn are not in `every.least`.
    """
    weight, normalize = weights.weigh(every.number * chance, mask, beta, factor), normalize_of(sharded)
    if normalize is None:
        return weight
    if normalize == "batch" and factors is None:
        return weights.normalized(weight, lax.pmax(jnp.max(weight), sharded.axis))
    largest = weights.largest_weight(every.number, every.least, beta, 1.0 if factors is None else factors)
    return weights.normalized(weight, largest)


def own_key(sharded: Any, key: jax.Array) -> jax.Array:
    """Return the key of this shard; the given one if there is one shard."""
    return key if sharded.shards == 1 else random.fold_in(key, lax.axis_index(sharded.axis))


def sample_local(
    sharded: Any, local: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[BufferState, Sample]:
    """Draw this shard's part of a batch of `batch_size`."""
    buffer, shards = sharded.shard, sharded.shards
    key, size = own_key(sharded, key), batch_size // shards
    if shards == 1:
        local, batch = read.sample.core(buffer, local, key, options, size)
        return local, sharded_batch(sharded, batch)
    anchors = anchor_set(buffer, local)
    if buffer.sampler.covers:
        sampler, drawn, number = _draw_remaining(sharded, local, key, size, anchors, options)
    else:
        sampler, drawn = buffer.sampler.draw(local.sampler, key, size, anchors, options, local.token)
        every = whole(sharded, local, anchors, drawn)
        drawn, number = of_whole(sharded, local, every, drawn, options.get("beta")), every.number
    window = read.window_of(buffer, local, key, drawn, anchors)
    local, batch = read.read_drawn(buffer, local.replace(sampler=sampler), key, drawn, window, partly=True)
    return count_empty(sharded, local, number), sharded_batch(sharded, batch)


def _draw_remaining(
    sharded: Any, local: BufferState, key: jax.Array, size: int, anchors: AnchorSet, options: dict[str, jax.Array]
) -> tuple[Any, Draw, jax.Array]:
    """Draw from a sampler that draws all anchors equally often; weights are 1. Also return the anchors of all shards."""
    part: Any = sharded.shard.sampler
    sampler, wanted, may_draw = local.sampler, jnp.int32(size), None
    if part.epochs:
        sampler, may_draw, number = _epoch_of_all(sharded, sampler, wanted)
        wanted = jnp.where(may_draw, wanted, jnp.int32(0))
    else:
        available = part.available(sampler, sum_of_lanes(anchors.counts))
        number = lax.psum(available, sharded.axis).astype(jnp.float32)
    sampler, drawn = part.draw_some(sampler, key, size, wanted, anchors, options, local.token)
    chance = jnp.broadcast_to(jnp.float32(1) / jnp.maximum(number, jnp.float32(1)), (size,))
    of_all = masked_draw(drawn.slot, chance, drawn.mask, sharded.shard.geometry)
    if may_draw is not None:
        of_all = dataclasses.replace(of_all, last=drawn.last | ~may_draw)
    return sampler, of_all, number


def _epoch_of_all(sharded: Any, sampler: Any, wanted: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Let a shard whose epoch has ended wait until those of all shards have, so that an epoch covers every anchor once.

    Returns:
      The sampler's state, bool[], whether this shard draws, and float32[], the anchors of the epoch.
    """
    begun, is_ended, anchors, anchors_next = sharded.shard.sampler.position(sampler, wanted)
    is_empty = is_ended & (anchors_next == jnp.int32(0))
    latest = lax.pmax(begun.astype(jnp.int32), sharded.axis)
    begun = jnp.where(is_empty, latest, begun.astype(jnp.int32))  # rows that arrive later wait for the next epoch
    following = begun + is_ended.astype(jnp.int32)
    now = lax.pmin(jnp.where(is_empty, jnp.int32(2**31 - 1), following), sharded.axis)
    may_draw = ~is_empty & (following == now)
    number = jnp.where(may_draw & is_ended, anchors_next, jnp.where(begun == now, anchors, jnp.int32(0)))
    position = dataclasses.replace(sampler.position, begun=begun.astype(jnp.uint32))
    return dataclasses.replace(sampler, position=position), may_draw, lax.psum(number, sharded.axis).astype(jnp.float32)


def count_empty(sharded: Any, local: BufferState, number: jax.Array) -> BufferState:
    """Count a draw from an empty buffer, on the first shard."""
    is_first = lax.axis_index(sharded.axis) == jnp.int32(0)
    is_empty = (number <= jnp.float32(0)) & is_first
    return local.replace(counters=count_up(local, empty_samples=is_empty))


def sharded_batch(sharded: Any, batch: Sample) -> Sample:
    """Return a shard's batch with the shard in its index."""
    shard = jnp.where(batch.mask, lax.axis_index(sharded.axis).astype(jnp.int32), jnp.int32(sharded.shards))
    last = batch.last
    if last is not None:  # an epoch ends when it has on every shard
        last = lax.pmin(last.astype(jnp.int32), sharded.axis) == jnp.int32(1)
    return dataclasses.replace(batch, index=dataclasses.replace(batch.index, shard=shard), last=last)


SLACK = 1.25  # rows that a shard may send at once, by those it receives
_COUNTS, _ORDER = 0x736E, 0x736F  # folded into the key


def batch_specs(sharded: Any, *_: Any) -> Sample:
    """Return the PartitionSpecs of a batch."""
    along: Any = split(sharded)
    index = Index(along, along, shard=along)
    return Sample(along, index, along, along, along, last=same() if sharded.buffer.sampler.epochs else None)


@operation(same, same, out=batch_specs)
def sample(
    sharded: Any, local: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[BufferState, Sample]:
    """Draw a batch of `batch_size`; return this device's part of it."""
    draw = sample_global if sharded.draw == "global" and sharded.shards > 1 else sample_local
    return draw(sharded, local, key, options, batch_size)


def sample_global(
    sharded: Any, local: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[BufferState, Sample]:
    """Draw a batch of `batch_size` from all shards in proportion to their mass; return this device's part of it."""
    buffer, shards, axis = sharded.shard, sharded.shards, sharded.axis
    me, size = lax.axis_index(axis).astype(jnp.int32), batch_size // shards
    block = min(-(-int(np.ceil(SLACK * size)) // shards), size)  # rows from one shard to one device at once
    most = block * shards
    anchors = anchor_set(buffer, local)
    every = whole(sharded, local, anchors)
    stratified = buffer.sampler.stratified
    uniform = jax.random.uniform(jax.random.fold_in(key, _COUNTS), () if stratified else (batch_size,), jnp.float32)
    end = quota.ends_by_mass(every.share, batch_size, uniform)
    start = jnp.concatenate([jnp.zeros((1,), jnp.int32), end[:-1]])
    rounds = jnp.max((end - start + jnp.int32(most - 1)) // jnp.int32(most))
    key = own_key(sharded, key)

    # The rows of this device: their numbers in the batch, in random order, their shards, and their numbers there.
    place = random.permutation(jax.random.fold_in(key, _ORDER), size) * jnp.int32(shards) + me
    owner = jnp.sum(place[:, None] >= end[None, :], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(owner, jnp.int32(shards - 1))
    nth = place - start[owner]
    each = lax.iota(np.int32, shards)

    def exchange(state: BufferState, number: jax.Array) -> tuple[BufferState, Any]:
        """Draw and send the rows of one round; return the rows that this device asked for in it."""
        local, first = state, number * jnp.int32(most)
        round_key = jax.random.fold_in(key, number)
        _, drawn = buffer.sampler.draw(local.sampler, round_key, most, anchors, options, local.token)
        # Device q gets the rows that are equal to q modulo D in the batch.
        offset = (each - start[me] - first) % jnp.int32(shards)
        at = (offset[:, None] + jnp.int32(shards) * lax.iota(np.int32, block)[None, :]).reshape(-1)
        mask = drawn.mask[at] & (first + at < end[me] - start[me]) & (every.share[me] > jnp.float32(0))
        drawn = masked_draw(drawn.slot[at], drawn.probability[at] * every.share[me], mask, buffer.geometry)
        window = read.window_of(buffer, local, round_key, drawn, anchors)
        local, batch = read.read_drawn(buffer, local, round_key, drawn, window, partly=True)
        sent = (batch.data, batch.index, batch.probability, batch.mask)
        blocks = jax.tree.map(lambda leaf: leaf.reshape(shards, block, *leaf.shape[1:]), sent)
        received = _blocks.exchange(blocks, axis)
        column = (nth - first - (me - start[owner] - first) % jnp.int32(shards)) // jnp.int32(shards)
        column = jnp.clip(column, jnp.int32(0), jnp.int32(block - 1))
        return local, jax.tree.map(lambda leaf: leaf[owner, column], received)

    def again(carry: Any) -> Any:
        number, counters, token, rows = carry
        after, found = exchange(local.replace(counters=counters, token=token), number)
        mine = nth // jnp.int32(most) == number
        rows = jax.tree.map(lambda new, old: jnp.where(expand(mine, new.ndim), new, old), found, rows)
        return number + jnp.int32(1), after.counters, after.token, rows

    shapes = jax.eval_shape(lambda: exchange(local, jnp.zeros((), jnp.int32))[1])
    empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    first = (jnp.zeros((), jnp.int32), local.counters, local.token, empty)
    _, counters, token, rows = control_flow.while_loop(lambda carry: carry[0] < rounds, again, first)
    batch = _batch(sharded, local, rows, owner, every, options)
    return count_empty(sharded, local.replace(counters=counters, token=token), every.number), batch


def _batch(
    sharded: Any, local: BufferState, rows: Any, owner: jax.Array, every: Whole, options: dict[str, jax.Array]
) -> Sample:
    """Return the batch of rows (data, index, probability, mask) of the shards int32[B / D] `owner`."""
    data, index, chance, mask = rows
    weight = mask.astype(jnp.float32)
    if sharded.shard.sampler.prioritized:
        beta = options.get("beta", local.sampler.beta)
        weight = weigh(sharded, every, chance, mask, beta, jnp.float32(1), None)
    shard = jnp.where(mask, owner, jnp.int32(sharded.shards))
    index = Index(jnp.where(mask, index.slot, jnp.int32(sharded.shard.capacity)), index.generation, shard=shard)
    return Sample(data, index, chance, weight, mask)
