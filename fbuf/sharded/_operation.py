"""`ShardedOperation`: a method as one jitted dispatch that runs a core on every shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fbuf._bridge import callbacks
from fbuf._buffer import checks
from fbuf._core import control_flow
from fbuf._core.dispatch import changes_of, with_changes
from fbuf.sharded._state import ShardedState


def is_local(axis: str) -> bool:
    """Return whether this is being traced inside `jax.shard_map` over the axis."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


@contextlib.contextmanager
def on_each_shard(sharded: Any, *trees: Any) -> Iterator[None]:
    """Trace a function of arrays of one shard."""
    each = callbacks.store_on_each_device(sharded.shards)
    with control_flow.varying_as(*trees), control_flow.summing_over(sharded.axis), each:
        yield


class ShardedOperation:
    """A function `(sharded, shard, *args, *static) -> (shard, result)` of the packed state of one shard.

    Unchanged leaves are not returned by the jitted call, which would copy them (`fbuf._core.dispatch`).
    """

    def __init__(self, core: Callable[..., tuple[Any, Any]]):
        name = core.__name__.strip("_").removesuffix("_core")
        core = jax.named_scope(f"fbuf.sharded.{name}")(core)

        def changes(
            sharded: Any, static: Any, specs: Any, out: Any, local: bool, state: ShardedState, args: Any
        ) -> Any:
            def on_shard(state: ShardedState, args: Any) -> Any:
                own = state.local()
                if not checks.fits(sharded.shard, own):
                    raise ValueError(
                        f"Sharded: this state was made by another buffer than {sharded.buffer!r}, with other sizes or "
                        f"parts. Use the Sharded that made it."
                    )
                with on_each_shard(sharded, state, args):
                    new, result = core(sharded, own, *args, *static)
                return jax.tree.map(lambda leaf: leaf if leaf.ndim else leaf[None], changes_of(own, new)), result

            if local:
                return on_shard(state, args)
            split = PartitionSpec(sharded.axis)
            state = placed(sharded.mesh, state, split)
            args = tuple(placed(sharded.mesh, arg, spec) for arg, spec in zip(args, specs, strict=True))
            run = jax.shard_map(on_shard, mesh=sharded.mesh, in_specs=(split, specs), out_specs=(split, out))
            return run(state, args)

        changes.__name__ = f"fbuf_sharded_{name}"
        self._jitted = jax.jit(changes, static_argnums=(0, 1, 2, 3, 4), inline=True)

    def __call__(
        self, sharded: Any, state: ShardedState, *args: Any, specs: Any = (), out: Any = None, static: Any = ()
    ) -> tuple[ShardedState, Any]:
        """Run the core on every shard.

        Args:
          specs: The PartitionSpec of each of `args`.
          out: The PartitionSpecs of the result; None: each shard has the whole of it.
        """
        out = PartitionSpec() if out is None else out
        changes, result = self._jitted(sharded, static, specs, out, is_local(sharded.axis), state, args)
        return ShardedState(with_changes(state.shards, changes), state.layout), result


def placed(mesh: Any, tree: Any, spec: PartitionSpec) -> Any:
    """Return arrays with the sharding that `jax.shard_map` expects over axes of type Explicit."""
    if AxisType.Explicit not in mesh.axis_types:
        return tree
    reshard: Any = getattr(jax, "reshard", None) or jax.sharding.reshard
    return jax.tree.map(lambda leaf: reshard(leaf, NamedSharding(mesh, spec)), tree)
