"""Hold the state of all shards, and `ShardedOperation`: a method as one jitted dispatch that runs a core on every shard.

A core names the PartitionSpecs of its arguments and of its result by functions of the `Sharded` and the static arguments. The
state is split into those of the shards in this process, and joined from them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fbuf._bridge import callbacks
from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, on_open
from fbuf._core import control_flow, text_table
from fbuf._core.component import component, state
from fbuf._core.dispatch import CALLBACK_ERRORS, Operation, changes_of, raise_cause, with_changes
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


P = ParamSpec("P")
R = TypeVar("R")
Spec = Callable[..., Any]


def same(*_: Any) -> PartitionSpec:
    """Return the spec of what is equal on all devices."""
    return PartitionSpec()


def split(sharded: Any, *_: Any) -> PartitionSpec:
    """Return the spec of arrays `[B, ...]`, which are split along B."""
    return PartitionSpec(sharded.axis)


def columns(sharded: Any, *_: Any) -> PartitionSpec:
    """Return the spec of arrays with one column a lane, without lanes one a shard."""
    return PartitionSpec(None, sharded.axis)


def by_lane(sharded: Any, *_: Any) -> PartitionSpec:
    """Return the spec of rows `[N, E, ...]`, which are split along E; without lanes `[N, ...]` along N."""
    return split(sharded) if sharded.buffer.lanes is None else columns(sharded)


def is_local(axis: str) -> bool:
    """Return whether this is being traced inside `jax.shard_map` over the axis."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


@contextlib.contextmanager
def on_each_shard(sharded: Any, *trees: Any) -> Iterator[None]:
    """Trace a function of arrays of one shard."""
    each = callbacks.store_on_each_device(sharded.shards)
    with control_flow.varying_as(*trees), control_flow.summing_over(sharded.axis), each:
        yield


class ShardedOperation(Generic[P, R]):
    """A function `(sharded, own, *args, *static) -> (own, result)` of the opened state of one shard, which runs on every shard.

    Unchanged leaves are not returned by the jitted call, which would copy them (`fbuf._core.dispatch`).

    Args:
      specs: The PartitionSpec of each of `args`.
      out: The PartitionSpecs of the result.
    """

    def __init__(self, core: Callable[P, R], specs: tuple[Spec, ...] = (), out: Spec = same):
        self.core = core
        name = core.__name__
        run_core = jax.named_scope(f"fbuf.sharded.{name}")(on_open(core))

        def changes(sharded: Any, static: Any, local: bool, state: ShardedState, args: Any) -> Any:
            def on_shard(state: ShardedState, args: Any) -> Any:
                shard = state.local()
                if not checks.fits(sharded.shard, shard):
                    raise ValueError(
                        f"Sharded: this state was made by another buffer than {sharded.buffer!r}, with other sizes or "
                        f"parts. Use the Sharded that made it."
                    )
                with on_each_shard(sharded, state, args):
                    new, result = run_core(sharded, shard, *args, *static)
                return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], changes_of(shard, new)), result

            if local:
                return on_shard(state, args)
            along, of_args = split(sharded), tuple(spec(sharded, *static) for spec in specs)
            state = placed(sharded.mesh, state, along)
            args = tuple(placed(sharded.mesh, arg, spec) for arg, spec in zip(args, of_args, strict=True))
            out_specs = (along, out(sharded, *static))
            run = jax.shard_map(on_shard, mesh=sharded.mesh, in_specs=(along, of_args), out_specs=out_specs)
            return run(state, args)

        changes.__name__ = f"fbuf_sharded_{name}"
        self._jitted = jax.jit(changes, static_argnums=(0, 1, 2), inline=True)

    def __call__(self, sharded: Any, state: ShardedState, *args: Any, static: Any = ()) -> tuple[ShardedState, Any]:
        try:
            changes, result = self._jitted(sharded, static, is_local(sharded.axis), state, args)
        except CALLBACK_ERRORS as error:
            raise_cause(state, error)
            raise
        return ShardedState(with_changes(state.shards, changes), state.layout), result


def operation(*specs: Spec, out: Spec = same) -> Callable[[Callable[P, R]], ShardedOperation[P, R]]:
    """Make a core a `ShardedOperation`, with the specs of its arguments and of its result."""
    return lambda core: ShardedOperation(core, specs, out)


def of_each(method: Operation[Any, Any], *specs: Spec, out: Spec = same) -> ShardedOperation[Any, Any]:
    """Return an operation that does on each shard what a method of `Buffer` does."""

    @functools.wraps(method.core)
    def core(sharded: Any, local: Any, *args: Any) -> tuple[Any, Any]:
        return method.core(sharded.shard, local, *args)

    return ShardedOperation(core, specs, out)


def placed(mesh: Any, tree: Any, spec: PartitionSpec) -> Any:
    """Return arrays with the sharding that `jax.shard_map` expects over axes of type Explicit."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    reshard: Any = getattr(jax, "reshard", None) or jax.sharding.reshard
    return jax.tree.map(lambda leaf: reshard(leaf, NamedSharding(mesh, spec)), tree)
