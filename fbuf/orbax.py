"""A buffer as one item of an `orbax.checkpoint.CheckpointManager`, beside the train state.

    import fbuf.orbax

    manager.save(step, args=ocp.args.Composite(
        train=ocp.args.StandardSave(train_state), replay=fbuf.orbax.SaveArgs(buffer, replay)))
    restored = manager.restore(step, args=ocp.args.Composite(
        train=ocp.args.StandardRestore(train_state), replay=fbuf.orbax.RestoreArgs()))
    buffer, replay = restored.replay

The item's folder is a checkpoint as `fbuf.save` writes it; each step is saved in full. Importing this module registers the
handler and needs `pip install "fbuf[orbax]"`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import save as saving
from fbuf._checkpoint.load import load
from fbuf._core.pytree import named_leaves
from fbuf._formats import checkpoint

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        f'fbuf.orbax: orbax is missing ({error}); expected orbax-checkpoint 0.12 or later. Run pip install "fbuf[orbax]".'
    ) from error

__all__ = ["ReplayHandler", "RestoreArgs", "SaveArgs"]

__dir__ = __all__.copy  # without the imports


class ReplayHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Save and restore `(buffer, state)`; orbax finds it through `SaveArgs` and `RestoreArgs`."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write the checkpoint, and wait for it.

        Raises:
          As `fbuf.save`.
        """
        arguments, arrays, meta = _gather(args, kwargs)
        _write(directory, arrays, meta, arguments.sync, arguments.progress)

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Copy the state, and write it in a thread once orbax has created the folder.

        The state may be donated when this returns. Errors are raised by `wait_until_finished`, `check_for_errors`, or
        the next save.
        """
        arguments, arrays, meta = _gather(args, kwargs)
        copies = checkpoint.snapshot(os.fspath(directory), arrays, lambda *_: True)
        sync, progress = arguments.sync, arguments.progress  # without a reference to the state

        async def write() -> None:
            _write(directory, copies, meta, sync, progress)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="fbuf")]

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> tuple[Buffer, BufferState]:
        """Return `(buffer, state)`.

        Raises:
          As `fbuf.load`; ValueError: `sharding` lacks a leaf.
        """
        arguments = _arguments("fbuf.orbax.RestoreArgs", RestoreArgs, args, kwargs) or RestoreArgs()
        settings = dict(vars(arguments))
        sharding = settings.pop("sharding")
        buffer, state = load(os.fspath(directory), **settings)
        return buffer, state if sharding is None else _place_state(state, sharding)

    def metadata(self, directory: Any) -> dict[str, Any]:
        """Return the manifest's description: the buffer's configuration, leaves of a row, versions, time."""
        with checkpoint.read(os.fspath(directory), verify="lazy") as saved:
            return dict(saved.meta)


@ocp.args.register_with_handler(ReplayHandler, for_save=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Name the items to save: `Composite(replay=SaveArgs(buffer, state), ...)`.

    Attributes:
      buffer, state: As for `fbuf.save`. Arrays may be sharded over the devices of this process.
      sync: Wait for the disk, so that a power failure does no harm. orbax itself does not.
      progress: True for a bar, or a callable of (bytes done, bytes in all).

    Raises:
      As `fbuf.save`, on construction and when orbax saves.

    Cost: with an asynchronous manager a copy of the state in host memory; otherwise a block.

    Example:
      >>> import fbuf, fbuf.orbax, tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
      ...     items = {"train": ocp.args.StandardSave({"w": jnp.ones(3)}), "replay": fbuf.orbax.SaveArgs(buffer, state)}
      ...     saved = manager.save(0, args=ocp.args.Composite(**items))
      ...     manager.wait_until_finished()
      ...     restored = manager.restore(0, args=ocp.args.Composite(replay=fbuf.orbax.RestoreArgs()))
      >>> buffer, state = restored.replay
      >>> buffer.rows(state, last=2).data["t"].tolist()
      [3, 4]
    """

    buffer: Any
    state: Any
    sync: bool = True
    progress: Any = None

    def __post_init__(self) -> None:
        """Check the state now: if an item fails later, orbax's threads for other items wait 300 s."""
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"fbuf.orbax: there are {jax.process_count()} processes; expected one. Use fbuf.save in each, with separate "
                f"paths."
            )
        saving.check_state("fbuf.orbax.SaveArgs", self.buffer, self.state)


@ocp.args.register_with_handler(ReplayHandler, for_restore=True)
@dataclasses.dataclass
class RestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Name the items to restore: `Composite(replay=RestoreArgs(), ...)` returns `(buffer, state)`.

    Attributes:
      buffer, example, verify, resize, progress: As for `fbuf.load`. None as buffer: the saved one.
      sharding: Where to place arrays: one `jax.sharding.Sharding`; or a state like the requested one, of arrays,
        `jax.ShapeDtypeStruct`s or shardings. None: the default device. Arrays are read there first, then distributed one by
        one, so the largest must fit.
    """

    buffer: Any = None
    example: Any = None
    verify: Literal["full", "lazy"] = "full"
    resize: Any = None
    sharding: Any = None
    progress: Any = None


def _arguments(call: str, kind: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that orbax passes on."""
    arguments = kwargs.get("args", args[0] if args else None)
    if arguments is not None and not isinstance(arguments, kind):
        raise TypeError(f"{call}: got {type(arguments).__name__}; expected {kind.__name__}. Write {call}(...).")
    return arguments


def _gather(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the arguments of a save, the sources, and their description."""
    arguments = _arguments("fbuf.orbax.SaveArgs", SaveArgs, args, kwargs)
    arguments.__post_init__()  # the state may have been donated since
    return arguments, *saving.gather(arguments.buffer, arguments.state)


def _write(directory: Any, arrays: Mapping[str, Any], meta: dict[str, Any], sync: bool, progress: Any) -> None:
    meta["extra"] = meta["replay"] = None
    checkpoint.write(os.fspath(directory), arrays, meta, keep=1, sync=sync, progress=progress)


def _place_state(state: BufferState, wanted: Any) -> BufferState:
    """Return the state with its arrays placed by `wanted`."""
    if isinstance(wanted, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, wanted), state)
    places = {name: getattr(leaf, "sharding", leaf) for name, leaf in named_leaves(wanted).items()}
    out = []
    for name, leaf in named_leaves(state).items():
        place = places.get(name)
        if not isinstance(place, (jax.sharding.Sharding, jax.Device)):
            raise ValueError(f"fbuf.orbax.RestoreArgs: sharding has {type(place).__name__} for leaf '{name}'.")
        out.append(jax.device_put(leaf, place))
    return jax.tree.unflatten(jax.tree.structure(state), out)
