"""Read the rows of a state in order of arrival, one leaf and one block at a time, for exports.

One compiled program per leaf asks the storage for a block, so buffers larger than memory can be written. Files are written
leaf after leaf: an npz member is one stream, and an h5 data set is contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import Spec
from fbuf._core.x64 import exact
from fbuf._indexing import scatter
from fbuf._indexing.anchors import CUT
from fbuf._interfaces.storage import Read
from fbuf.interop._columns import BLOCK_BYTES
from fbuf.storages import Ragged


class Reader:
    """The rows of a state, oldest first.

    Attributes:
      spec: Of a row.
      lanes: E; None: one stream.
      sizes: int64[E], rows of each lane.
    """

    def __init__(self, call: str, buffer: Buffer, state: BufferState) -> None:
        if not isinstance(buffer, Buffer) or not isinstance(state, BufferState):
            raise TypeError(f"{call}: {type(buffer).__name__} and {type(state).__name__}; expected a Buffer and state.")
        if isinstance(buffer.storage, Ragged):
            raise TypeError(f"{call}: {buffer.storage!r} has rows of several shapes. Use fbuf.save.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            raise TypeError(f"{call}: the state is traced; expected an eager call, outside jax.jit.")
        self.call, self.buffer, self.state = call, buffer, state
        self.spec: Spec = buffer.storage.spec(state.rows)[0]
        self.lanes = buffer.lanes
        self.sizes = np.asarray(state.ring.size).astype(np.int64)
        self._cursor = np.asarray(state.ring.cursor).astype(np.int64)
        self._order = None if state.scatter is None else np.asarray(scatter.by_age(state.scatter))

    @property
    def steps(self) -> int:
        """Rows of the longest lane."""
        return int(self.sizes.max(initial=0))

    def mask(self, first: int, last: int) -> np.ndarray:
        """Return bool[n, E], which rows exist."""
        age = np.arange(first, last)[:, None]
        if self._order is not None:
            return age * len(self.sizes) + np.arange(len(self.sizes)) < self.sizes.sum()
        return age < self.sizes[None, :]

    def slots(self, age: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Return the slots of rows by age, 0 the oldest of its lane."""
        lanes, length, _ = self.buffer.geometry
        if self._order is not None:
            return self._order[age * lanes + lane]
        return (self._cursor[lane] - self.sizes[lane] + age) % length * lanes + lane

    def block(self, name: str) -> int:
        """Return the number of rows of a leaf in a block, over all lanes."""
        leaf = self.spec[name]
        rows = BLOCK_BYTES // max(1, math.prod(leaf.shape) * leaf.dtype.itemsize)
        return max(1, min(rows, self.buffer.capacity))

    def leaf(self, name: str, slot: np.ndarray, block: int) -> np.ndarray:
        """Return a leaf of up to `block` rows, `[len(slot), item]`; zeros where the slot is C.

        Raises:
          RuntimeError: a row has expired.
        """
        nowhere = self.buffer.capacity
        padded = np.full(block, nowhere, np.int32)
        padded[: len(slot)] = slot
        rows, ok = _gather(self.buffer, name, self.state, jnp.asarray(padded))
        if ok is not None and not np.asarray(ok)[: len(slot)][slot < nowhere].all():
            raise RuntimeError(f"{self.call}: rows of this state have expired. Use the newest state.")
        return np.asarray(exact(self.call, self.spec, {name: rows})[name])[: len(slot)]

    def steps_of(self, name: str) -> Iterator[np.ndarray]:
        """Yield a leaf of all rows, in blocks `[n, ...]`, with lanes `[n, E, ...]`; zeros where a lane has fewer rows."""
        lanes = len(self.sizes)
        rows = max(1, self.block(name) // lanes)
        for first in range(0, self.steps, rows):
            last = min(first + rows, self.steps)
            mask = self.mask(first, last)
            age, lane = np.nonzero(mask)
            slot = np.full(mask.shape, self.buffer.capacity, np.int64)
            slot[mask] = self.slots(age + first, lane)
            block = self.leaf(name, slot.reshape(-1), rows * lanes)
            yield block if self.lanes is None else block.reshape(last - first, lanes, *block.shape[1:])

    def flag(self, name: str) -> np.ndarray:
        """Return a boolean leaf of all rows, bool[T, E]; False where a lane has fewer."""
        empty = np.zeros((0, len(self.sizes)), bool)
        return np.concatenate([empty, *(block.reshape(len(block), -1) for block in self.steps_of(name))])

    def cuts(self) -> np.ndarray:
        """Return after which rows is a cut, bool[T, E]."""
        there = self.mask(0, self.steps)
        if self.state.anchors is None:
            return np.zeros_like(there)
        slots = self.slots(*np.indices(there.shape))
        return there & (np.asarray(self.state.anchors.flags)[slots] & CUT > 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gather(buffer: Buffer, name: str, state: Any, slot: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    arrays, ok = buffer.storage.read(state.rows, [Read(name, slot)])
    return arrays[0], ok
