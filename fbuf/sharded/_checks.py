"""Check the buffer and the mesh of `Sharded`, and the arguments of its methods."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import refuse_donated
from fbuf._core.control_flow import axes_of
from fbuf._core.sample import Index
from fbuf._members import split
from fbuf.sharded._operation import is_local
from fbuf.sharded._state import ShardedState, keeps_rows_on_host
from fbuf.storages import Deduplicated, Device
from fbuf.transforms import Normalize, NormalizeReward


def check_parts(buffer: Any, mesh: Any, axis: Any) -> None:
    """Raise unless the buffer can be split over the axis."""
    if not isinstance(buffer, Buffer):
        raise TypeError(f"Sharded: buffer is {type(buffer).__name__}; expected a Buffer. States go to the methods.")
    if not isinstance(mesh, Mesh):
        raise TypeError(f"Sharded: mesh is {type(mesh).__name__}; expected a Mesh. Use jax.make_mesh((8,), ('data',)).")
    if axis not in mesh.axis_names:
        names = ", ".join(f"'{name}'" for name in mesh.axis_names)
        raise ValueError(f"Sharded: axis is {axis!r}; expected one of the mesh: {names}.")
    shards = int(mesh.shape[axis])
    for name in ("capacity", "lanes", "batch_size"):
        value = getattr(buffer, name)
        if value is not None:
            split.check_multiple("Sharded", name, value, shards, of_axis(axis))
    if not isinstance(buffer.storage, (Device, Deduplicated)) and not keeps_rows_on_host(buffer):
        raise ValueError(
            f"Sharded: storage is {buffer.storage!r}; expected Device(), Deduplicated(...), or Host(...) or Compressed(...) "
            f"in memory."
        )
    if keeps_rows_on_host(buffer) and mesh.size != shards:
        raise ValueError(
            f"Sharded: {buffer.storage!r} keeps rows on the host, but {mesh.size // shards} devices would have each shard, and "
            f"would write each row as often. Use a mesh of axis '{axis}' alone, or storages.Deduplicated()."
        )
    if buffer.sampler.on_host:
        raise ValueError(
            f"Sharded: {buffer.sampler!r} keeps priorities on the host; expected on='device'. Leave it out."
        )
    if buffer.prefetch:
        raise ValueError("Sharded: prefetch is 1; expected 0. Write dataclasses.replace(buffer, prefetch=0).")
    if shards > 1:
        split.check_split("Sharded", buffer, shards, merged=(Normalize, NormalizeReward), may_cover=True)


def of_axis(axis: str) -> str:
    """Return which shards are meant, for `split.check_multiple`."""
    return f" of axis '{axis}'"


def check_multiple(call: str, sharded: Any, name: str, value: int) -> None:
    """Raise unless the number can be divided among the shards."""
    split.check_multiple(call, name, value, sharded.shards, of_axis(sharded.axis))


def check_key(call: str, axis: str, key: Any) -> None:
    """Raise for a key of each device, by which shards would not agree on their numbers of rows; `check_vma=False` hides it."""
    if axis in axes_of(key):
        raise ValueError(
            f"{call}: the key varies over axis '{axis}'; expected the same key on all devices. Pass it to jax.shard_map with "
            f"in_specs=PartitionSpec(); each shard draws other rows with it."
        )


def check_axis(call: str, sharded: Any) -> None:
    """Raise inside `jax.shard_map` over a mesh of another size."""
    size = dict(jax.sharding.get_abstract_mesh().shape).get(sharded.axis, sharded.shards)
    if is_local(sharded.axis) and size != sharded.shards:
        raise ValueError(
            f"{call}: axis '{sharded.axis}' of this shard_map has {size} devices; expected {sharded.shards}. Use the mesh of "
            f"the Sharded."
        )


def check_state(call: str, sharded: Any, state: Any) -> None:
    """Raise for another type, a donated state, or the state of another mesh or number of shards."""
    checks.check_state_type(call, type(sharded), ShardedState, state)
    refuse_donated(call, state.shards)
    checks.refuse_stacked(call, type(sharded), state.shards)
    check_axis(call, sharded)
    if state.layout.shards != sharded.shards:
        raise ValueError(
            f"{call}: the state has {state.layout.shards} shards; expected {sharded.shards}, of axis '{sharded.axis}'. Save "
            f"it, and write fbuf.load(path, sharded)."
        )
    header = state.shards.header
    place = None if isinstance(header, jax.core.Tracer) else header.sharding
    if isinstance(place, NamedSharding) and place.mesh != sharded.mesh and place.mesh.devices.size > 1:
        one, other = (
            f"{mesh} of devices {[device.id for device in mesh.devices.flat]}" for mesh in (place.mesh, sharded.mesh)
        )
        raise ValueError(
            f"{call}: the state is on another mesh: {one}; expected {other}. Save it, and write "
            f"fbuf.load(path, sharded)."
        )


def check_made_by(call: str, sharded: Any, state: Any) -> None:
    """Raise as `check_state` does, and if another buffer made the state."""
    check_state(call, sharded, state)
    jax.eval_shape(sharded.size, state)


def checked_index(call: str, sharded: Any, index: Any, axes: tuple[int, ...] = (1, 2)) -> Index:
    """Return the index with its dtypes; its length is a multiple of D."""
    index = checks.check_index(call, index, axes, "shard")
    if not is_local(sharded.axis):
        check_multiple(call, sharded, "the length of index", index.slot.shape[0])
    return index


def check_order(call: str, sharded: Any) -> None:
    """Raise if rows have no order over all shards."""
    if sharded.buffer.lanes is None and sharded.shards > 1 and not is_local(sharded.axis):
        raise ValueError(
            f"{call}: without lanes rows have no order over {sharded.shards} shards. Use lanes={sharded.shards}, or call it "
            f"inside jax.shard_map, for the rows of each shard."
        )


def buffer_here(sharded: Any) -> Buffer:
    """Return the buffer whose lanes the caller's arrays have: of the whole, or inside `jax.shard_map` of a shard."""
    return sharded.shard if is_local(sharded.axis) else sharded.buffer
