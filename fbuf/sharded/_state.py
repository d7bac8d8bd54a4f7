"""Hold the state of all shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fbuf._buffer.state import BufferState
from fbuf._core import text_table
from fbuf._core.component import component, state


@component
class Layout:
    """How leaves of shards are joined. Static."""

    shards: int  # D
    scalars: tuple[bool, ...]  # which leaves of a shard have no axes


@state
class ShardedState:
    """Hold the state of a sharded buffer: a pytree of arrays, each split along its first axis over the mesh axis.

    The leaves of all shards are joined along their first axis; a scalar of each shard makes an array `[D]`.
    """

    shards: BufferState
    layout: Layout

    def local(self) -> BufferState:
        """Return the state of one shard, of which this is the block."""
        leaves = zip(jax.tree.leaves(self.shards), self.layout.scalars, strict=True)
        structure: Any = jax.tree.structure(self.shards)
        return structure.unflatten([leaf[0] if scalar else leaf for leaf, scalar in leaves])

    def _shown(self) -> Any:
        """Return what `text_table` prints: the joined state, whose header has one row a shard; None if it is elsewhere."""
        header = self.shards.header
        if isinstance(header, jax.Array) and not isinstance(header, jax.core.Tracer) and not header.is_deleted():
            is_addressable = header.is_fully_addressable
            header = np.asarray(header).reshape(self.layout.shards, -1) if is_addressable else None
        return dataclasses.replace(self.shards, header=header)

    def __repr__(self) -> str:
        return text_table.as_text(self._shown(), "ShardedState")

    def _repr_html_(self) -> str:
        return text_table.as_html(self._shown(), "ShardedState")


def block_of(shards: int, local: BufferState) -> ShardedState:
    """Return the block that holds the state of one shard."""
    leaves = jax.tree.leaves(local)
    structure: Any = jax.tree.structure(local)
    layout = Layout(shards, tuple(leaf.ndim == 0 for leaf in leaves))
    return ShardedState(structure.unflatten([leaf if leaf.ndim else leaf[None] for leaf in leaves]), layout)
