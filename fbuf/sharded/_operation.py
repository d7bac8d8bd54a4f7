"""`ShardedOperation`: a method as one jitted dispatch that runs a core on every shard.

A core names the PartitionSpecs of its arguments and of its result by functions of the `Sharded` and the static arguments.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fbuf._bridge import callbacks
from fbuf._buffer import checks
from fbuf._buffer.state import on_open
from fbuf._core import control_flow
from fbuf._core.dispatch import CALLBACK_ERRORS, Operation, changes_of, raise_cause, with_changes
from fbuf.sharded._state import ShardedState

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
