"""`newest`: the `Index` of the rows that `Replay.extend` wrote, from the rings after the write.

A replay computes it when it is read, or before the next write if the caller still references it. An index without references
is never computed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import unpack
from fbuf._core.sample import Index
from fbuf._core.slots import by_age
from fbuf._interfaces.writer import Streaming


@functools.partial(jax.jit, static_argnums=(0, 1))
def newest(buffer: Buffer, count: int, header: jax.Array, mask: jax.Array | None) -> Index:
    """Return the index of the newest rows: `count` in each lane, of which a mask bool[N] or bool[N, E] was written."""
    assert isinstance(buffer.writer, Streaming)
    geometry, ring = buffer.geometry, unpack(header).ring
    keep = jnp.ones((count, geometry.lanes), bool) if mask is None else mask.reshape(count, geometry.lanes)
    before = ring.size - jnp.sum(keep, axis=0, dtype=jnp.int32)
    age = before[None, :] + jnp.cumsum(keep, axis=0, dtype=jnp.int32) - jnp.int32(1)
    present = keep & (age >= jnp.int32(0))
    slot = jnp.where(present, by_age(ring, geometry, age), jnp.int32(geometry.capacity))
    slot = slot[:, 0] if buffer.lanes is None else slot
    return Index(slot, buffer.writer.generation(ring, geometry, slot))
