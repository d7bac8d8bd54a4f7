"""Read rows by index, update them and set their priorities, in any order and from any device.

Every shard is told all indices, and answers for its own rows. With draw="local" rows are where they were drawn, unless the
caller reordered the batch over devices. One small collective tells whether any priorities are of rows elsewhere; only then 16
bytes a row are sent to every device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer import priorities, read, write
from fbuf._buffer.state import BufferState, anchor_count, flat_index
from fbuf._core import control_flow
from fbuf._core.dispatch import update_if
from fbuf._core.sample import Index, Rows
from fbuf.sharded import _blocks
from fbuf.sharded._operation import by_lane, operation, same, split


@operation(split, split, split, same)
def update_priority(
    sharded: Any, local: BufferState, index: Index, td_error: jax.Array, mask: Any, eta: Any
) -> tuple[BufferState, None]:
    """Set the priorities of this shard's rows among those of all devices."""
    buffer, shards = sharded.shard, sharded.shards
    me, nowhere = lax.axis_index(sharded.axis).astype(jnp.int32), jnp.int32(buffer.capacity)
    error = td_error.astype(jnp.float32)
    slots = Index(index.slot, index.generation)
    if mask is not None and eta is not None:
        error, is_finite = priorities.window_error(error, mask, eta)
        error = jnp.where(is_finite, error, jnp.float32(jnp.nan))
    else:
        error, slots = error.reshape(-1), flat_index(slots, mask, buffer.capacity)
    shard, slots, is_masked = homes(sharded, index.shard.reshape(-1), slots)
    if shards == 1:
        return priorities.update_priority.core(buffer, local, slots, error, None, None)
    if sharded.draw == "global":
        return _send(sharded, local, shard, slots, error), None
    is_home = shard == me
    here = Index(jnp.where(is_home, slots.slot, nowhere), jnp.where(is_home, slots.generation, jnp.uint32(0)))
    after = priorities.update_priority.core(buffer, local, here, error, None, None)[0]
    elsewhere = jnp.any(~is_home & ~is_masked).astype(jnp.float32)
    elsewhere, largest = lax.pmax(jnp.stack([elsewhere, _largest(sharded, after)]), sharded.axis)
    some = elsewhere > jnp.float32(0)
    # If any are sent, all are set again, in the order of the batch, and counted then.
    after = after.replace(counters=jnp.where(some, local.counters, after.counters))
    after = _with_largest(sharded, after, largest)

    def send(_: jax.Array, local: BufferState, error: jax.Array) -> tuple[BufferState, jax.Array]:
        return _send(sharded, local, shard, slots, error), error

    return update_if(some, send, after, error)[0], None


def homes(sharded: Any, shard: jax.Array, index: Index) -> tuple[jax.Array, Index, jax.Array]:
    """Return the shard that takes each row, D for none, its index there, and which rows are masked.

    The first shard counts rows of no shard, whose slots are -1.
    """
    shards, nowhere = jnp.int32(sharded.shards), jnp.int32(sharded.shard.capacity)
    is_masked = (index.slot == nowhere) & (index.generation == jnp.uint32(0))
    foreign = ((shard < jnp.int32(0)) | (shard >= shards)) & ~is_masked
    index = Index(jnp.where(foreign, jnp.int32(-1), index.slot), index.generation)
    return jnp.where(is_masked, shards, jnp.where(foreign, jnp.int32(0), shard)), index, is_masked


def _send(sharded: Any, local: BufferState, shard: jax.Array, index: Index, error: jax.Array) -> BufferState:
    """Send rows to their shards, which set their priorities: int32[R], [R] and float32[R]; D: no shard."""
    buffer, shards, nowhere = sharded.shard, sharded.shards, jnp.int32(sharded.shard.capacity)
    bits = [lax.bitcast_convert_type(words, jnp.int32) for words in (index.generation, error)]
    every = lax.all_gather(jnp.stack([shard, index.slot, *bits], axis=1), sharded.axis, tiled=True)

    size, total = error.shape[0], error.shape[0] * shards
    mine = every[:, 0] == lax.axis_index(sharded.axis).astype(jnp.int32)
    rank = jnp.cumsum(mine, dtype=jnp.int32)
    place = jnp.where(mine, rank - jnp.int32(1), jnp.int32(total))
    at = jnp.zeros((total,), jnp.int32).at[place].set(lax.iota(np.int32, total), mode="drop")

    def some(carry: Any) -> Any:
        """Set the next priorities of this shard, as many as a device has rows."""
        first, sampler, header = carry
        nth = first + lax.iota(np.int32, size)
        row = every[at[jnp.minimum(nth, jnp.int32(total - 1))]]
        exists = nth < rank[-1]
        generation, error = (
            lax.bitcast_convert_type(row[:, i], kind) for i, kind in ((2, jnp.uint32), (3, jnp.float32))
        )
        index = Index(jnp.where(exists, row[:, 1], nowhere), jnp.where(exists, generation, jnp.uint32(0)))
        error = jnp.where(exists, error, jnp.float32(0))
        state = dataclasses.replace(local, sampler=sampler, header=header)
        state = priorities.update_priority.core(buffer, state, index, error, None, None)[0]
        return first + jnp.int32(size), state.sampler, state.header

    start = (jnp.zeros((), jnp.int32), local.sampler, local.header)
    _, sampler, header = control_flow.while_loop(lambda carry: carry[0] < rank[-1], some, start)
    return share_numbers(sharded, dataclasses.replace(local, sampler=sampler, header=header))


def _largest(sharded: Any, local: BufferState) -> jax.Array:
    """Return the largest priority of this shard; -1 if that of rows held is asked for, and there are none."""
    largest: jax.Array = local.sampler.max_priority
    if sharded.shard.sampler.largest == "held":
        is_empty = jnp.sum(anchor_count(local), dtype=jnp.int32) == jnp.int32(0)
        largest = jnp.where(is_empty, jnp.float32(-1), largest)
    return largest


def _with_largest(sharded: Any, local: BufferState, largest: jax.Array) -> BufferState:
    """Return a state with the largest priority of all shards, from that of `_largest` of each."""
    largest = jnp.where(largest >= jnp.float32(0), largest, jnp.float32(1))
    return dataclasses.replace(local, sampler=sharded.shard.sampler.set(local.sampler, max_priority=largest))


def share_numbers(sharded: Any, local: BufferState) -> BufferState:
    """Return a state with the largest priority, or the newest version, of all shards."""
    sampler = local.sampler
    if sharded.shards == 1:
        return local
    if sharded.shard.sampler.prioritized:
        return _with_largest(sharded, local, lax.pmax(_largest(sharded, local), sharded.axis))
    if getattr(sampler, "version", None) is not None:
        sampler = dataclasses.replace(sampler, version=lax.pmax(sampler.version, sharded.axis))
    return dataclasses.replace(local, sampler=sampler)


def _of_shard(sharded: Any, shard: jax.Array, index: Index) -> Index:
    """Return the index of this shard's rows among those of all devices, on which the others are masked."""
    words = jnp.stack([shard, index.slot, lax.bitcast_convert_type(index.generation, jnp.int32)], axis=-1)
    words = lax.all_gather(words, sharded.axis, tiled=True)
    mine = words[..., 0] == lax.axis_index(sharded.axis).astype(jnp.int32)
    generation = lax.bitcast_convert_type(words[..., 2], jnp.uint32)
    return Index(
        jnp.where(mine, words[..., 1], jnp.int32(sharded.shard.capacity)), jnp.where(mine, generation, jnp.uint32(0))
    )


def _ask(sharded: Any, index: Index, answer: Callable[[Index], Any]) -> Any:
    """Return leaves `[R, ...]` of what their shards answer about R rows; each shard reads the rows of all devices."""
    shards, size = sharded.shards, index.slot.size
    shard, rows, _ = homes(
        sharded, index.shard.reshape(-1), Index(index.slot.reshape(-1), index.generation.reshape(-1))
    )
    if shards == 1:
        return answer(rows)
    owner, number = jnp.minimum(shard, jnp.int32(shards - 1)), lax.iota(np.int32, size)

    answers = answer(_of_shard(sharded, shard, rows))
    blocks = jax.tree.map(lambda leaf: leaf.reshape(shards, size, *leaf.shape[1:]), answers)
    return jax.tree.map(lambda leaf: leaf[owner, number], _blocks.exchange(blocks, sharded.axis))


def _indexed(sharded: Any, rows: Rows, shard: jax.Array) -> Rows:
    """Return rows of `shard` with the index of the whole."""
    shard = jnp.where(rows.mask, shard, jnp.int32(sharded.shards))
    return dataclasses.replace(rows, index=dataclasses.replace(rows.index, shard=shard))


@operation(split, out=split)
def get(sharded: Any, local: BufferState, index: Index) -> tuple[BufferState, Rows]:
    """Return rows by index."""
    rows = _ask(sharded, index, lambda rows: read.get.core(sharded.shard, local, rows)[1])
    rows = jax.tree.map(lambda leaf: leaf.reshape(index.slot.shape + leaf.shape[1:]), rows)
    return local, _indexed(sharded, rows, index.shard)


@operation(out=by_lane)
def all_rows(sharded: Any, local: BufferState) -> tuple[BufferState, Rows]:
    """Return every row of this shard, oldest first."""
    rows = read.all_rows.core(sharded.shard, local)[1]
    return local, _indexed(sharded, rows, lax.axis_index(sharded.axis).astype(jnp.int32))


@operation(out=by_lane)
def last(sharded: Any, local: BufferState, n: int) -> tuple[BufferState, Rows]:
    """Return the newest rows of this shard's lanes."""
    rows = read.last.core(sharded.shard, local, n)[1]
    return local, _indexed(sharded, rows, lax.axis_index(sharded.axis).astype(jnp.int32))


@operation(split, out=split)
def read_priorities(sharded: Any, local: BufferState, index: Index) -> tuple[BufferState, jax.Array]:
    """Return |p| of rows."""
    found = _ask(sharded, index, lambda rows: priorities.read_priorities.core(sharded.shard, local, rows)[1])
    return local, found.reshape(index.slot.shape)


@operation(out=by_lane)
def all_priorities(sharded: Any, local: BufferState) -> tuple[BufferState, jax.Array]:
    """Return |p| of all rows of this shard, in the order of `all_rows`."""
    return priorities.read_priorities.core(sharded.shard, local, None)


@operation(split, out=split)
def window_index(sharded: Any, local: BufferState, index: Index) -> tuple[BufferState, Index]:
    """Return the rows of windows; rows of no shard keep their index."""
    rows = _ask(sharded, index, lambda rows: read.window_index.core(sharded.shard, local, rows)[1])
    foreign = (index.shard < jnp.int32(0)) | (index.shard >= jnp.int32(sharded.shards))
    slot = jnp.where(foreign[:, None], index.slot[:, None], rows.slot)
    generation = jnp.where(foreign[:, None], index.generation[:, None], rows.generation)
    masked = (slot == jnp.int32(sharded.shard.capacity)) & (generation == jnp.uint32(0))
    shard = jnp.where(masked, jnp.int32(sharded.shards), index.shard[:, None])
    return local, Index(slot, generation, shard=shard)


@operation(split, split, split)
def update_rows(
    sharded: Any, local: BufferState, index: Index, leaves: dict[str, jax.Array], mask: jax.Array | None
) -> tuple[BufferState, None]:
    """Replace leaves of rows; they are sent to all devices if any of them is not on the device that has its index."""
    buffer, nowhere = sharded.shard, jnp.int32(sharded.shard.capacity)
    slot, generation = index.slot, index.generation
    if mask is not None:
        slot, generation = jnp.where(mask, slot, nowhere), jnp.where(mask, generation, jnp.uint32(0))
    shard, rows, is_masked = homes(sharded, index.shard, Index(slot, generation))
    if sharded.shards == 1:
        return write.update_rows.core(buffer, local, rows, leaves, None)

    def send(_: Any, local: BufferState, leaves: Any) -> tuple[BufferState, Any]:
        every = lax.all_gather(leaves, sharded.axis, tiled=True)
        return write.update_rows.core(buffer, local, _of_shard(sharded, shard, rows), every, None)[0], leaves

    if sharded.draw == "global":
        return send(None, local, leaves)[0], None
    elsewhere = jnp.any((shard != lax.axis_index(sharded.axis).astype(jnp.int32)) & ~is_masked)
    some = lax.pmax(elsewhere.astype(jnp.int32), sharded.axis) > jnp.int32(0)
    here = Index(jnp.where(some, nowhere, rows.slot), jnp.where(some, jnp.uint32(0), rows.generation))
    local = write.update_rows.core(buffer, local, here, leaves, None)[0]
    return update_if(some, send, local, leaves)[0], None
