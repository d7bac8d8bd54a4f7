r"""Draw rows of all shards in proportion to their mass, and move them to the devices (`draw="global"`).

The shards' numbers of rows in a batch follow from one random number that all shards know, as the batch of one buffer would
have them: :math:`\lfloor B \sum_{r \le s} g_r + u \rfloor` differences if the sampler is stratified, multinomial otherwise. Row
p of the batch is sent to device p mod D, so all blocks of the `all_to_all` have equal sizes. A shard sends a quarter more than
B / D rows at once; if its mass is larger, the exchange is repeated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._algorithms import random
from fbuf._buffer import read
from fbuf._buffer import state as state_ops
from fbuf._buffer.state import BufferState
from fbuf._core import control_flow
from fbuf._core.sample import Index, Sample
from fbuf._core.slots import expand
from fbuf._members import quota
from fbuf.samplers._base import masked_draw
from fbuf.sharded import _blocks
from fbuf.sharded._draw import Whole, count_empty, own_key, sample_local, weigh, whole
from fbuf.sharded._operation import operation, same, split

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
    anchors = state_ops.anchor_set(buffer, local)
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
