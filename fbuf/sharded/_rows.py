"""Read and update rows by index, from any device: every shard is told all indices, and answers for its own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer import priorities, read, write
from fbuf._buffer.state import BufferState
from fbuf._core.dispatch import update_if
from fbuf._core.sample import Index, Rows
from fbuf.sharded import _blocks
from fbuf.sharded._feedback import homes
from fbuf.sharded._operation import by_lane, operation, split


def _own(sharded: Any, shard: jax.Array, index: Index) -> Index:
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

    answers = answer(_own(sharded, shard, rows))
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
        return write.update_rows.core(buffer, local, _own(sharded, shard, rows), every, None)[0], leaves

    if sharded.draw == "global":
        return send(None, local, leaves)[0], None
    elsewhere = jnp.any((shard != lax.axis_index(sharded.axis).astype(jnp.int32)) & ~is_masked)
    some = lax.pmax(elsewhere.astype(jnp.int32), sharded.axis) > jnp.int32(0)
    here = Index(jnp.where(some, nowhere, rows.slot), jnp.where(some, jnp.uint32(0), rows.generation))
    local = write.update_rows.core(buffer, local, here, leaves, None)[0]
    return update_if(some, send, local, leaves)[0], None
