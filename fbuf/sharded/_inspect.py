"""Describe the whole of a sharded buffer: `stats`, what summaries and plots show, and `plan`, the bytes of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fbuf._buffer import init, read, transforms
from fbuf._buffer import plan as of_buffer
from fbuf._buffer import state as state_ops
from fbuf._buffer.state import BufferState
from fbuf._buffer.summary import collect
from fbuf.sharded import _checks
from fbuf.sharded._draw import gather, whole
from fbuf.sharded._operation import columns, of_each, operation, same, split
from fbuf.sharded._state import ShardedState, block_of

_LATEST = ("epoch", "version")
"""Counts of `stats` that are not sums; nor are those of transforms, whose statistics are of the whole."""


@operation()
def stats(sharded: Any, local: BufferState) -> tuple[BufferState, dict[str, jax.Array]]:
    """Return scalars of the whole."""
    axis, shards = sharded.axis, sharded.shards
    each = read.stats.core(sharded.shard, local)[1]
    out, latest = {}, {*_LATEST, *transforms.stats(sharded.shard, local)}
    for name, value in each.items():
        if name == "cursor":
            same = lax.pmax(value, axis) == lax.pmin(value, axis)
            out[name] = jnp.where(same, lax.pmax(value, axis), jnp.int32(-1))
        elif value.dtype == jnp.bool_:
            out[name] = lax.pmin(value.astype(jnp.int32), axis) == jnp.int32(1)
        elif jnp.issubdtype(value.dtype, jnp.floating) or name in latest:
            kind = jnp.int32 if value.dtype == jnp.uint32 else value.dtype
            out[name] = lax.pmax(value.astype(kind), axis).astype(value.dtype)
        elif name == "writes":
            out[name] = lax.psum(jnp.minimum(value, jnp.uint32(0xFFFFFFFF // shards)), axis)
        else:
            out[name] = lax.psum(value, axis)
    number = each["anchors"].astype(jnp.float32)
    total, squares = lax.psum((number, number * number), axis)
    out["balance"] = _balance(total, squares, shards)
    return local, out


def _balance(total: jax.Array, squares: jax.Array, shards: int) -> jax.Array:
    """Return (sum m)^2 / (D sum m^2), 1 if nothing has mass."""
    even = total * total / jnp.where(squares > jnp.float32(0), squares * jnp.float32(shards), jnp.float32(1))
    return jnp.where(total > jnp.float32(0), even, jnp.float32(1))


def _specs_of_look(sharded: Any, *_: Any) -> Any:
    return columns(sharded), split(sharded), same()


@operation(out=_specs_of_look)
def look(sharded: Any, local: BufferState, number: int) -> tuple[BufferState, Any]:
    """Return what `collect.look` does: of rows, of rows that are compared, and of the whole."""
    shard, axis = sharded.shard, sharded.axis
    found = collect.look.core(shard, local, number)[1]
    chance, share = found.get("probability"), jnp.ones((1,), jnp.float32)
    if shard.sampler.covers:
        share = gather(sharded, jnp.sum(chance > jnp.float32(0), dtype=jnp.int32).astype(jnp.float32)[None])[:, 0]
        share = share / jnp.maximum(jnp.sum(share), jnp.float32(1))
    elif sharded.shards > 1:
        share = whole(sharded, local, state_ops.anchor_set(shard, local)).share
    if chance is not None:
        found["probability"] = chance * share[lax.axis_index(axis)]
    of_all = {
        "stats": stats.core(sharded, local)[1]
        | {"balance": _balance(jnp.sum(share), jnp.sum(share**2), sharded.shards)},
        "available": lax.psum(found.pop("available"), axis),
    }
    if "newest" in found:  # one shard
        of_all["newest"] = lax.pmax(found.pop("newest"), axis)
    del found["stats"]
    return local, (found, found.pop("hashes", {}), of_all)


_row_flags = of_each(collect.row_flags, out=columns)


@operation()
def size(sharded: Any, local: BufferState) -> tuple[BufferState, jax.Array]:
    """Return int32[], the rows held by all shards."""
    return local, lax.psum(read.size.core(sharded.shard, local)[1], sharded.axis)


@operation()
def can_sample(sharded: Any, local: BufferState) -> tuple[BufferState, jax.Array]:
    """Return whether any shard has an anchor to draw."""
    anchors = jnp.sum(state_ops.anchor_count(local), dtype=jnp.int32)
    available = sharded.shard.sampler.available(local.sampler, anchors)
    return local, lax.psum(available, sharded.axis) > jnp.int32(0)


@operation(same)
def can_add(sharded: Any, local: BufferState, number: jax.Array) -> tuple[BufferState, jax.Array]:
    """Return whether every shard has room."""
    here = read.can_add.core(sharded.shard, local, number)[1]
    return local, lax.pmin(here.astype(jnp.int32), sharded.axis) == jnp.int32(1)


def unlearnt(sharded: Any, state: ShardedState) -> dict[str, Any]:
    """Return the rows of all shards that no window learns, as `Buffer.stats` does; nothing if other processes have some."""
    flags = None if state.shards.anchors is None else state.shards.anchors.flags
    if isinstance(flags, jax.Array) and not isinstance(flags, jax.core.Tracer) and not flags.is_fully_addressable:
        return {}
    return collect.unlearnt(sharded.buffer, state.shards, lambda: _row_flags(sharded, state)[1])


def seen(sharded: Any, state: ShardedState, compare: int = 0) -> collect.Seen:
    """Return arrays about every row, with one column a lane, without lanes one a shard. Eager."""
    number = collect.newest_of_each(sharded.buffer if sharded.buffer.lanes else sharded.shard, compare)
    rows, hashes, of_all = jax.device_get(look(sharded, state, static=(number,))[1])
    return collect.seen_of(sharded.buffer, {**rows, **of_all, "hashes": hashes})


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
