"""Draw a batch from a mixture of sharded buffers: every shard draws once, from all buffers, in one `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from fbuf._buffer import state as state_ops
from fbuf._core.dispatch import changes_of, with_changes
from fbuf._core.sample import Sample
from fbuf._members.mixture import draw
from fbuf._members.mixture.draw import MixtureConfig
from fbuf.sharded import Sharded
from fbuf.sharded._checks import check_multiple, check_state
from fbuf.sharded._draw import own_key, whole
from fbuf.sharded._operation import is_local, on_each_shard, placed
from fbuf.sharded._state import block_of

__all__ = ["check_state", "checked_sizes", "sample"]


def checked_sizes(
    call: str, sharded: Sharded, names: tuple[str, ...], batch_size: int, sizes: tuple[int, ...] | None
) -> tuple[int, tuple[int, ...] | None]:
    """Return the rows that each device draws, and those of each buffer; raise unless all are multiples of D."""
    for name, size in zip(names, sizes, strict=True) if sizes is not None else [("batch_size", batch_size)]:
        check_multiple(call, sharded, name, size)
    each = None if sizes is None else tuple(size // sharded.shards for size in sizes)
    return batch_size // sharded.shards, each


def sample(
    mixture: MixtureConfig, one: Sharded, states: dict[str, Any], args: tuple[Any, ...], static: tuple[Any, ...]
) -> tuple[dict[str, Any], Sample]:
    """Draw a batch, split over the axis of `one`, any of the buffers; `args` and `static` are those of `draw.sample`."""
    changes, batch = _sample(mixture, one, is_local(one.axis), static, states, args)
    return with_changes(states, changes), batch


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=True)
def _sample(mixture: MixtureConfig, one: Sharded, local: bool, static: Any, states: Any, args: Any) -> Any:
    """Return the changed leaves of the states, and a batch."""
    run = functools.partial(jax.named_scope("fbuf.sharded.mixture")(_sample_on_shard), mixture, one, static)

    def on_shard(states: Any, args: Any) -> Any:
        with on_each_shard(one, states, args):
            return run(states, args)

    if not local:
        split, same = PartitionSpec(one.axis), PartitionSpec()
        states, args = placed(one.mesh, states, split), placed(one.mesh, args, same)
        on_shard = jax.shard_map(on_shard, mesh=one.mesh, in_specs=(split, same), out_specs=(split, split))
    after, batch = on_shard(states, args)
    return changes_of(states, after), batch


def _sample_on_shard(mixture: MixtureConfig, one: Sharded, static: Any, states: Any, args: Any) -> Any:
    """Draw the part of a batch that this shard provides; return its states, and the part."""
    (key, fractions, beta), (sizes, batch_size) = args, static
    me = lax.axis_index(one.axis)
    blocks = {name: states[name].local() for name in mixture.names}
    opened = {name: block.open() for name, block in blocks.items()}
    shares = [jnp.float32(1)] * len(opened)
    if one.shards > 1:
        shares = [
            whole(sharded, opened[name], state_ops.anchor_set(sharded.shard, opened[name])).share[me]
            for name, sharded in mixture.members
        ]
    local = dataclasses.replace(mixture, buffers=tuple((name, sharded.shard) for name, sharded in mixture.members))
    number = lax.psum(draw.available(local, opened), one.axis)
    of_shard = draw.OfShard(one.shards, one.axis, number, jnp.stack(shares))
    after, batch = draw.sample.core(local, blocks, own_key(one, key), fractions, beta, sizes, batch_size, of_shard)
    shard = jnp.where(batch.mask, me.astype(jnp.int32), jnp.int32(one.shards))
    batch = dataclasses.replace(batch, index=dataclasses.replace(batch.index, shard=shard))
    return {name: block_of(one.shards, after[name]) for name in mixture.names}, batch
