"""Batches for NumPy and torch whose rows NumPy reads in the memory of the state's arrays.

XLA reads large arrays with several threads on CPUs, which costs more than NumPy's reads of some hundred rows. Programs for
such batches therefore return what was drawn as one array, and no rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.packed_leaf import is_packed
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Sample
from fbuf._replay.row_block import RowBlock
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.storages import Device
from fbuf.views import Row
from fbuf.writers import Ring

_DTYPES = np.int32, np.uint32, np.float32, np.float32  # of slot, ticket, probability and weight; then the mask


class HostBatch(NamedTuple):
    """Leaves of a `Sample` as NumPy arrays that nothing else refers to."""

    leaves: list[np.ndarray[Any, Any]]
    structure: Any

    def to_numpy(self) -> Sample:
        """Return a batch of arrays."""
        batch: Sample = self.structure.unflatten(self.leaves)
        return batch

    def to_torch(self) -> Sample:
        """Return a batch of tensors."""
        from fbuf.torch._dtypes import import_torch

        torch = import_torch("Replay.sample")
        batch: Sample = self.structure.unflatten([torch.from_numpy(leaf) for leaf in self.leaves])
        return batch


def can_read(buffer: Buffer, state: BufferState) -> bool:
    """Return whether batches are the drawn rows, of dtypes that NumPy shares. The state must be in CPU memory."""
    uniform = type(buffer.view) is Row and type(buffer.sampler) in (Uniform, Prioritized, Ranked)
    return uniform and buffer.dense and can_share(buffer, state)


def can_share(buffer: Buffer, state: BufferState) -> bool:
    """Return whether NumPy can read the rows of a state in CPU memory, and nothing maps them afterwards."""
    rows = (type(buffer.storage), type(buffer.writer)) == (Device, Ring)
    if not rows or buffer.prefetch or buffer.on_read is not None:
        return False
    if any(map(is_packed, jax.tree.leaves(state.rows, is_leaf=is_packed))):
        return False
    # Python's buffers have no bfloat16 or float8.
    return all(np.dtype(leaf.dtype).isbuiltin != 2 for leaf in jax.tree.leaves(state.rows))


def structure_of(rows: PyTree) -> Any:
    """Return the structure of batches of such rows."""
    return jax.tree.structure(Sample(rows, Index(0, 0), 0, 0, 0))  # type: ignore[arg-type]


def take(rows: PyTree, slot: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the leaves `[B, item]` of the rows in slots int[B]; slots out of range give other rows."""
    slot = slot.astype(np.intp)  # once, not once a leaf
    # A view that outlives the call would make the next write copy the rows.
    return [np.asarray(memoryview(leaf)).take(slot, 0, mode="clip") for leaf in jax.tree.leaves(rows)]


class At(NamedTuple):
    """Where rows are: in slots of the state, modulo C, except for those that are in a `RowBlock`."""

    slot: np.ndarray[Any, Any]
    new: Any = None  # which are in the block, if any
    index: Any = None  # of these in the columns of the block


class HeldRows:
    """Rows of a state and those collected since, by slot.

    Args:
      buffer, state: Of the replay.
      cursor: int64[E], of the state.
      block: The collected rows, or None.
      flags: Of the collected rows.
    """

    def __init__(self, buffer: Buffer, state: BufferState, cursor: Any, block: RowBlock | None, flags: Any):
        self._leaves, self._state, self._fresh = jax.tree.leaves(state.rows), state, flags
        self._by_lane, (self.lanes, self._length, _) = buffer.lanes is not None, buffer.geometry
        self._cursor, self._block, self._count = cursor, block, 0 if block is None else block.count
        self._near: np.ndarray[Any, Any] | None = None  # entries of a batch some of whose rows may be in the block
        self._lane: Any = 0

    def around(self, slot: np.ndarray[Any, Any], lane: Any, back: int, ahead: int) -> None:
        """Prepare to read rows up to `back` before and `ahead` after the slots int64[B] of lanes."""
        if not self._count:
            return
        position = slot if self.lanes == 1 else slot // self.lanes
        step = (position - self._cursor[lane]) % self._length
        near = step < self._count + back
        if ahead:
            near |= step >= self._length - ahead
        (self._near,) = near.nonzero()
        self._lane = lane[self._near] if self.lanes > 1 else np.zeros_like(self._near)

    def at(self, slot: np.ndarray[Any, Any]) -> At:
        """Return the places of slots int64[B] or [B, T], in range modulo C."""
        if self._near is None or not self._near.size:
            return At(slot)
        near = slot[self._near]
        cursor = self._cursor[self._lane]
        position = near if self.lanes == 1 else near // self.lanes
        step = (position - (cursor if near.ndim == 1 else cursor[:, None])) % self._length
        found = (step < self._count).nonzero()
        entry, index = found[0], step[found]
        new = self._near[entry] if near.ndim == 1 else (self._near[entry], found[1])
        return At(slot, new, (index, self._lane[entry]) if self._by_lane else index)

    def flags(self, at: At) -> np.ndarray[Any, Any]:
        """Return the flags of rows, uint8[B]."""
        assert self._state.anchors is not None
        return _read(self._state.anchors.flags, self._fresh, at)

    def take(self, number: int, at: At) -> np.ndarray[Any, Any]:
        """Return a leaf of rows, `[B, item]`."""
        return _read(self._leaves[number], None if self._block is None else self._block.columns[number], at)

    def all(self, at: At) -> list[np.ndarray[Any, Any]]:
        """Return every leaf of rows."""
        return [self.take(number, at) for number in range(len(self._leaves))]


def _read(array: Any, column: Any, at: At) -> np.ndarray[Any, Any]:
    # A view that outlives the call would make the next write copy the rows.
    leaf = np.asarray(memoryview(array)).take(at.slot, 0, mode="wrap")
    if at.new is not None:
        leaf[at.new] = column[at.index]
    return leaf


def pack(batch: Sample) -> jax.Array:
    """Return what was drawn as int32[5, B]. Traced."""
    leaves = batch.index.slot, batch.index.ticket, batch.probability, batch.weight
    return jnp.stack([*(jax.lax.bitcast_convert_type(x, jnp.int32) for x in leaves), batch.mask.astype(jnp.int32)])


def read(drawn: np.ndarray[Any, Any], rows: PyTree, structure: Any) -> tuple[HostBatch, bool]:
    """Return the packed batch with its rows, and whether it is without masked entries."""
    mask = drawn[4] != 0
    leaves, full = take(rows, drawn[0]), np.count_nonzero(mask) == mask.size
    if not full:
        for leaf in leaves:
            leaf[~mask] = 0
    fields = (part.view(dtype) for part, dtype in zip(drawn, _DTYPES, strict=False))
    return HostBatch([*leaves, *fields, mask], structure), full
