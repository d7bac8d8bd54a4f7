"""More room for rows in a state that has some: the same slots, indices and priorities under a larger capacity.

A lane's rows lie at positions 0, 1, 2, ... until it comes round for the first time, so that until then (and after `clear`)
everything kept by slot, or by place in a lane, is the beginning of what the larger buffer keeps. Rejected: adding the rows
anew, which forgets priorities and epochs; and capacities that grow inside jit, where shapes cannot change.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._buffer import operations, state_ops
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState
from fbuf._core.geometry import Ring
from fbuf._indexing.anchor_log import EpisodeLog
from fbuf._interfaces.sampler import host_sampler
from fbuf._interfaces.storage import RaggedStorage
from fbuf.samplers import PrioritizedState, RankedState

B = TypeVar("B", bound=BufferConfig)


def grow(buffer: B, state: BufferState, capacity: Any) -> tuple[B, BufferState]:
    """A buffer of `capacity` (None: twice as much) and its state; see `Buffer.grow`.

    Raises:
      TypeError: the state is traced.
      ValueError: the capacity is no larger, or a lane has come round and overwritten rows.
    """
    if isinstance(state.token, jax.core.Tracer):
        raise TypeError("Buffer.grow: the state is traced, but shapes change. Call grow outside jit.")
    capacity = 2 * buffer.capacity if capacity is None else capacity
    if not isinstance(capacity, (int, np.integer)) or isinstance(capacity, bool) or capacity <= buffer.capacity:
        raise ValueError(f"Buffer.grow: capacity is {capacity!r}; expected an int > {buffer.capacity}, what there is.")
    length = buffer.geometry.length
    cursor, size = np.asarray(state.ring.cursor), np.asarray(state.ring.size)
    if ((cursor - size) % length).any():
        raise ValueError(
            f"Buffer.grow: rows have been overwritten, so there is no room between the newest and the oldest; expected a "
            f"buffer that has not come round ({length} rows a lane). Grow earlier, or add the rows to a larger buffer: "
            f"other.extend(other.init(example), rows)."
        )
    other = dataclasses.replace(buffer, capacity=int(capacity))
    assert isinstance(buffer.storage, RaggedStorage)
    storage: RaggedStorage = buffer.storage
    ring = _longer_ring(state.ring, length)
    rows = storage.with_capacity(state.rows, other.geometry)
    fresh = state_ops.empty_state(other, rows)
    if isinstance(state.sampler, EpisodeLog):  # numbers episodes by the length of a lane
        grown = dataclasses.replace(fresh, rows=rows, ring=ring)
        anchors, sampler = operations.convert(other, grown, None, static=(other,))[1]
    else:
        anchors = jax.tree.map(_longer, state.anchors, fresh.anchors)
        kept = host_sampler(buffer.sampler)
        if kept is not None:
            sampler = kept.with_capacity(state.sampler, other.geometry)
        else:
            sampler = _longer_sampler(state.sampler, fresh.sampler, buffer.capacity, other.capacity)
    return other, dataclasses.replace(state, rows=rows, ring=ring, anchors=anchors, sampler=sampler)


def _longer(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """What is kept, then what is empty."""
    return old if old.shape == fresh.shape else jnp.concatenate([old, fresh[old.shape[0] :]])


def _longer_sampler(old: Any, fresh: Any, capacity: int, number: int) -> Any:
    if isinstance(old, RankedState):
        log = jax.tree.map(_longer, old.log, fresh.log)
        return dataclasses.replace(old, log=log, ranks=rank_buckets.grown(old.ranks, capacity, number))
    if not isinstance(old, PrioritizedState):
        return jax.tree.map(_longer, old, fresh)

    def tree(nodes: jax.Array, empty: jax.Array, reduce: Any) -> jax.Array:
        if not nodes.shape[0]:
            return nodes
        return sum_tree.rebuild(_longer(nodes[:capacity], empty), reduce=reduce)

    return dataclasses.replace(
        old,
        tree=tree(old.tree, jnp.zeros((number,), jnp.float32), "sum"),
        low=tree(old.low, jnp.full((number,), jnp.inf, jnp.float32), "min"),
        top=None if old.top is None else tree(old.top, jnp.full((number,), -jnp.inf, jnp.float32), "max"),
        log=jax.tree.map(_longer, old.log, fresh.log),
    )


def _longer_ring(ring: Ring, length: int) -> Ring:
    """A lane that is just full is at its next row, not at its first again."""
    full = ring.size == jnp.int32(length)
    before = jnp.where(ring.lap == jnp.uint32(1), jnp.uint32(2**32 - 1), ring.lap - jnp.uint32(1))
    return Ring(cursor=jnp.array(ring.size, copy=True), size=ring.size, lap=jnp.where(full, before, ring.lap))
