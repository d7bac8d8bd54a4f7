"""Larger buffers with the same slots, indices and priorities.

Until a lane overwrites its first row, its rows are at positions 0, 1, 2, ..., so every array by slot, or by position in a
lane, is a prefix of the larger buffer's.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import convert
from fbuf._buffer.state import BufferConfig, BufferState, empty_state
from fbuf._core.slots import Ring, lengthened
from fbuf._interfaces.storage import Storage

B = TypeVar("B", bound=BufferConfig)


def grow(buffer: B, state: BufferState, blocks: Any, capacity: Any) -> tuple[B, BufferState]:
    """Return a larger buffer and its state; see `Buffer.grow`."""
    call, storage = "Buffer.grow", buffer.storage
    if storage.ragged:
        if blocks is not None:
            raise TypeError(f"{call}: blocks is {blocks!r}, but {storage!r} has none. Use capacity=.")
        return _grow_rows(call, buffer, storage, state, capacity)
    if capacity is not None or not storage.grows:
        raise TypeError(f"{call}: {storage!r} cannot grow. Add the rows to a larger buffer.")
    larger, rows = storage.grow(state.rows, blocks)
    return dataclasses.replace(buffer, storage=larger), dataclasses.replace(state, rows=rows)


def _grow_rows(call: str, buffer: B, storage: Storage, state: BufferState, capacity: Any) -> tuple[B, BufferState]:
    """Return a buffer of `capacity` (None: twice as much) and its state."""
    if isinstance(state.header, jax.core.Tracer):
        raise TypeError(f"{call}: the state is traced, but shapes change. Call grow outside jit.")
    capacity = 2 * buffer.capacity if capacity is None else capacity
    if not isinstance(capacity, (int, np.integer)) or isinstance(capacity, bool) or capacity <= buffer.capacity:
        raise ValueError(f"{call}: capacity is {capacity!r}; expected an int > {buffer.capacity}.")
    length = buffer.geometry.length
    cursor, size = np.asarray(state.ring.cursor), np.asarray(state.ring.size)
    if ((cursor - size) % length).any():
        raise ValueError(
            f"{call}: rows have been overwritten; expected at most {length} rows per lane so far. Grow earlier, or add the "
            f"rows to a larger buffer: other.extend(other.init(example), rows)."
        )
    other = dataclasses.replace(buffer, capacity=int(capacity))
    ring = _longer_ring(state.ring, length)
    rows = storage.with_capacity(state.rows, other.geometry)
    fresh = empty_state(other, rows)
    anchors = jax.tree.map(lengthened, state.anchors, fresh.anchors)
    if buffer.sampler.by_episode:  # numbers episodes by the length of a lane
        grown = fresh.replace(rows=rows, ring=ring, anchors=anchors)
        anchors, sampler = convert.convert(other, grown, None, static=(other,))[1]
    else:
        sampler = buffer.sampler.grown(state.sampler, fresh.sampler, other.geometry, buffer.capacity)
    return other, state.replace(rows=rows, ring=ring, anchors=anchors, sampler=sampler)


def _longer_ring(ring: Ring, length: int) -> Ring:
    """Return rings of longer lanes: the next row of a full lane is after its last."""
    full = ring.size == jnp.int32(length)
    before = jnp.where(ring.lap == jnp.uint32(1), jnp.uint32(2**32 - 1), ring.lap - jnp.uint32(1))
    return Ring(cursor=jnp.array(ring.size, copy=True), size=ring.size, lap=jnp.where(full, before, ring.lap))
