"""Hold the state of all shards; split it into those of the shards in this process, and join them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core import text_table
from fbuf._core.component import component, state
from fbuf._core.pytree import PyTree, needs_x64
from fbuf.storages import Compressed, Host, _host_rows
from fbuf.storages._host_rows import SideRows


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


def keeps_rows_on_host(buffer: Buffer) -> bool:
    """Return whether each shard has a store on the host."""
    return isinstance(buffer.storage, (Compressed, Host)) and not buffer.storage.in_files


def states_here(sharded: Any, state: ShardedState) -> dict[int, BufferState]:
    """Return the states of shards by number; of a shard on several devices, in one process. Eager."""
    place = NamedSharding(sharded.mesh, PartitionSpec(sharded.axis))
    found: dict[int, list[jax.Array]] = {}
    for leaf, scalar in zip(jax.tree.leaves(state.shards), state.layout.scalars, strict=True):
        leaf = jax.device_put(leaf, place)
        for block in leaf.addressable_shards:
            if block.replica_id == 0:
                number = (block.index[0].start or 0) * sharded.shards // leaf.shape[0]
                found.setdefault(number, []).append(np.asarray(block.data)[0] if scalar else block.data)
    structure: Any = jax.tree.structure(state.shards)
    return {number: structure.unflatten(leaves) for number, leaves in sorted(found.items())}


def numbers_here(sharded: Any) -> dict[int, list[Any]]:
    """Return the devices of each shard that are in this process."""
    place = NamedSharding(sharded.mesh, PartitionSpec(sharded.axis))
    found: dict[int, list[Any]] = {}
    for device, index in place.addressable_devices_indices_map((sharded.shards,)).items():
        found.setdefault((index[0].start or 0) if index else 0, []).append(device)
    return found


def making_arrays_for(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Make arrays on a device; for CPUs, which share memory, on the first, so that programs compile once."""
    return jax.default_device(jax.local_devices(backend="cpu")[0] if device.platform == "cpu" else device)


def init_each(sharded: Any, example: PyTree) -> ShardedState:
    """Return the state of an empty buffer whose shards open a store each. Eager."""
    states = {}
    for number, devices in numbers_here(sharded).items():
        with making_arrays_for(devices[0]):
            states[number] = sharded.shard.init(example)
    return join(sharded, states)


def join(sharded: Any, states: Mapping[int, BufferState]) -> ShardedState:
    """Return the state of all shards, from those of the shards in this process. Eager."""
    here = numbers_here(sharded)
    if all(isinstance(state.rows, SideRows) for state in states.values()):
        for name, leaf in sharded.shard.storage.spec(next(iter(states.values())).rows)[0].items():
            if needs_x64(leaf.dtype):
                raise ValueError(
                    f"Sharded: leaf '{name}' is {leaf.dtype}, which shards do not keep without x64. Use 32 bits, or "
                    f"jax.config.update('jax_enable_x64', True)."
                )
        rows = _host_rows.grouped({number: state.rows for number, state in states.items()})
        states = {number: dataclasses.replace(state, rows=rows[number]) for number, state in states.items()}
    states = {n: jax.tree.map(lambda x: x if x.ndim else np.asarray(x), state) for n, state in states.items()}
    blocks = [jax.device_put(block_of(sharded.shards, states[n]), d) for n, devices in here.items() for d in devices]
    place = NamedSharding(sharded.mesh, PartitionSpec(sharded.axis))

    def whole(*parts: jax.Array) -> jax.Array:
        shape = (sharded.shards * parts[0].shape[0], *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, place, list(parts))

    return jax.tree.map(whole, *blocks)
