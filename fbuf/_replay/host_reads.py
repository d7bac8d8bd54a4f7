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
    parts = type(buffer.storage), type(buffer.view), type(buffer.writer)
    rows = parts == (Device, Row, Ring) and type(buffer.sampler) in (Uniform, Prioritized, Ranked)
    if not rows or not buffer.dense or buffer.prefetch or buffer.on_read is not None:
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
