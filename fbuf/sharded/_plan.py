"""`Sharded.plan`: the bytes of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fbuf._buffer import init
from fbuf._buffer import plan as of_buffer
from fbuf._buffer import state as state_ops
from fbuf.sharded import _checks
from fbuf.sharded._state import block_of


def plan(
    sharded: Any, example: Any, *, batch_size: int | None = None, num_rows: int = 1, rows: Any = None, **settings: Any
) -> of_buffer.Plan:
    """Return the plan of one shard, with the peak of a `sample` that moves rows."""
    shards, shard = sharded.shards, sharded.shard
    size = batch_size or sharded.buffer.batch_size or 32 * shards
    _checks.check_multiple("Sharded.plan", sharded, "batch_size", size)
    if shard.lanes is None:
        num_rows = -(-num_rows // shards)
    elif rows is not None:
        rows = jax.tree.map(lambda leaf: leaf[:, : shard.lanes], rows)
    one = of_buffer.plan(shard, example, batch_size=size // shards, num_rows=num_rows, rows=rows, **settings)
    if sharded.draw == "local" or shards == 1:
        return one
    split = NamedSharding(sharded.mesh, PartitionSpec(sharded.axis))
    call = "Sharded.plan"
    stored, was = init.stored_example(call, shard, example)
    rows = shard.storage.abstract(shard.geometry, init.checked_spec(shard, call, stored), jax.tree.structure(stored))
    state = jax.eval_shape(lambda rows: block_of(shards, state_ops.empty_state(shard, rows, was)), rows)
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((shards * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=split), state
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    peak = of_buffer.peak(lambda state, key: sharded.sample(state, key, size), (state, key), (0,))
    return dataclasses.replace(one, peak_sample=peak)
