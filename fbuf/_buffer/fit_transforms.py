"""What transforms at read know of rows that are there already: of a data set, of files, of a state made without them.

The rows held are looked at once, in blocks, and nothing is read but the leaves that a stage learns from.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._buffer import state_ops
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState, Transforms
from fbuf._core.dispatch import Operation
from fbuf._core.pytree import item_bytes
from fbuf._interfaces.storage import Read
from fbuf.transforms import Chain

BLOCK_BYTES = 1 << 24
"""Of rows looked at together."""


def _observe_core(buffer: BufferConfig, state: BufferState, stages: Chain) -> tuple[BufferState, dict[str, Any]]:
    """What `stages` know after all rows held."""
    spec, _ = buffer.storage.spec(state.rows)
    names = stages.watches(spec)
    capacity = buffer.geometry.capacity
    block = max(1, min(capacity, BLOCK_BYTES // max(1, sum(item_bytes(spec[name]) for name in names))))

    def more(number: jax.Array, memory: Any) -> Any:
        slot = number.astype(jnp.int32) * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32)
        inside = slot < jnp.int32(capacity)
        at = jnp.where(inside, slot, jnp.int32(0))
        held = inside & (state_ops.generation(buffer, state, at) != jnp.uint32(0))
        arrays, ok = buffer.storage.read(state.rows, [Read(n, jnp.where(held, at, jnp.int32(capacity))) for n in names])
        held = held if ok is None else held & ok
        return stages.observe(memory, {n: a[:, None] for n, a in zip(names, arrays, strict=True)}, held[:, None])

    return state, lax.fori_loop(0, -(-capacity // block), more, stages.init(spec))


_observe = Operation(_observe_core)


def fit_transforms(buffer: BufferConfig, state: BufferState, *, since: BufferConfig | None = None) -> BufferState:
    """A state, of `since` or else of `buffer`, with what the stages of `buffer.on_read` know of its rows.

    Stages that `since` had under the same name go on with what they knew. Cost: O(C) where there is one that learns anew.
    """
    was, stages = state.transforms, Chain() if buffer.on_read is None else buffer.on_read
    kept: dict[str, Any] = {}
    if since is not None and was is not None:
        kept = {name: was.read[name] for name in same_stages(since.on_read, stages) if name in was.read}
    new = Chain(tuple((name, stage) for name, stage in stages if name not in kept))
    if new.remembers:
        read = kept | _observe(since or buffer, state, static=(new,))[1]
    else:
        read = kept | new.init(buffer.storage.spec(state.rows)[0])
    given, write = (None, {}) if was is None else (was.given, was.write)
    some = given is not None or bool(jax.tree.leaves(read))
    return dataclasses.replace(state, transforms=Transforms(given, write, read) if some else None)


def same_stages(one: Chain | None, other: Chain) -> list[str]:
    """Names under which both chains have the same stage."""
    return [name for name, stage in one or () if name in other and other[name] == stage]
