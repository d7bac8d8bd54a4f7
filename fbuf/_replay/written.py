"""`WrittenIndex`: the `Index` of the rows that `Replay.extend` wrote, computed when it is read.

It follows from the rings after the write. A replay computes the index of its last write before the next write, if the caller
still references it. An index without references is never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import unpack
from fbuf._core.sample import Index
from fbuf._core.slots import by_age
from fbuf._interfaces.writer import Streaming


class WrittenIndex(Index):
    """An `Index` that calls `compute(index)`, which stores the index in it, when an array is first read."""

    known: Index | None

    def __init__(self, compute: Callable[[WrittenIndex], None]) -> None:
        self.__dict__.update(compute=compute, known=None)

    def read(self) -> Index:
        """Return the index."""
        if self.known is None:
            self.__dict__["compute"](self)
        assert self.known is not None
        return self.known

    def store(self, index: Index) -> None:
        """Set the index, and drop the function."""
        self.__dict__.update(compute=None, known=index)

    def __reduce__(self) -> Any:  # a copy, or a pickle, is an Index: only this one is computed before the next write
        return Index, (self.slot, self.generation)

    @property
    def slot(self) -> jax.Array:
        """int32[N] or int32[N, E], as of any `Index`."""
        return self.read().slot

    @property
    def generation(self) -> jax.Array:
        """uint32, of the same shape."""
        return self.read().generation


def _index(aux: None, leaves: Any) -> Any:
    return Index(*leaves)


jax.tree_util.register_pytree_node(WrittenIndex, lambda index: ((index.slot, index.generation), None), _index)


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
