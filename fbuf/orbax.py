"""A buffer as one item of an `orbax.checkpoint.CheckpointManager`, beside the train state.

    import fbuf.orbax

    manager.save(step, args=ocp.args.Composite(
        train=ocp.args.StandardSave(train_state), replay=fbuf.orbax.SaveArgs(buffer, replay)))
    restored = manager.restore(step, args=ocp.args.Composite(
        train=ocp.args.StandardRestore(train_state), replay=fbuf.orbax.RestoreArgs()))
    buffer, replay = restored.replay

Steps, retention, commits and the background thread are orbax's; what lies in the item's folder is a checkpoint as
`fbuf.save` writes it. Handing the state's arrays to orbax was rejected: it casts silently where dtypes differ, refuses arrays
of no rows, does not notice flipped bits in large arrays, and knows nothing of rows on the host. The price: each step
is saved whole, as orbax keeps steps apart; `fbuf.save` to a path of its own writes what is new.

With an asynchronous manager `save` returns when the state is copied to host memory, so that the next step may donate it;
errors come where orbax raises them: `wait_until_finished`, `check_for_errors`, or the next `save`.

This module imports orbax (`pip install "fbuf[orbax]"`), and importing it registers the handler.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import save as saving
from fbuf._checkpoint.async_save import Snapshot
from fbuf._checkpoint.load import load
from fbuf._core.pytree import named_leaves
from fbuf._formats import checkpoint

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        f'fbuf.orbax: orbax is missing ({error}); expected orbax-checkpoint 0.12 or later. Run pip install "fbuf[orbax]".'
    ) from error


class ReplayHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Saves and restores `(buffer, state)`; found by orbax through `SaveArgs` and `RestoreArgs`."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Writes the checkpoint, and waits for it.

        Raises:
          As `fbuf.save`.
        """
        given = _given("fbuf.orbax.SaveArgs", SaveArgs, args, kwargs)
        _alone()
        saving.check_state("fbuf.orbax.SaveArgs", given.buffer, given.state)
        arrays, meta = saving.gathered("fbuf.orbax.SaveArgs", given.buffer, given.state)
        _write(directory, arrays, meta, given.sync, given.progress)

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Copies the state, and writes it in a thread once orbax has made the folder."""
        given = _given("fbuf.orbax.SaveArgs", SaveArgs, args, kwargs)
        _alone()
        saving.check_state("fbuf.orbax.SaveArgs", given.buffer, given.state)
        arrays, meta = saving.gathered("fbuf.orbax.SaveArgs", given.buffer, given.state)
        held = {name: Snapshot(name, source, None) for name, source in arrays.items()}
        sync, progress = given.sync, given.progress  # and not the state

        async def write() -> None:
            _write(directory, held, meta, sync, progress)

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="fbuf")]

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> tuple[Buffer, BufferState]:
        """`(buffer, state)`.

        Raises:
          As `fbuf.load`; ValueError: `sharding` lacks a leaf.
        """
        given = _given("fbuf.orbax.RestoreArgs", RestoreArgs, args, kwargs) or RestoreArgs()
        buffer, state = load(
            os.fspath(directory),
            given.buffer,
            example=given.example,
            verify=given.verify,
            resize=given.resize,
            progress=given.progress,
        )
        return buffer, state if given.sharding is None else _spread(state, given.sharding)

    def metadata(self, directory: Any) -> dict[str, Any]:
        """What the manifest says: the buffer's configuration, leaves of a row, versions, time."""
        with checkpoint.read(os.fspath(directory), verify="lazy") as saved:
            return dict(saved.meta)


@ocp.args.register_with_handler(ReplayHandler, for_save=True)
@dataclasses.dataclass
class SaveArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: `Composite(replay=SaveArgs(buffer, state), ...)`.

    Attributes:
      buffer, state: As for `fbuf.save`. Arrays may be sharded over the devices of this process.
      sync: Wait for the disk, so that a failure of power does no harm. orbax itself does not.
      progress: True: a bar; or a function of bytes done and bytes in all.

    Raises:
      As `fbuf.save`, when it is made, and once more when orbax saves.

    Cost: with an asynchronous manager a copy of the state in host memory, of rows on the host as they are held there; else a
    block.

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
      >>> buffer.last(state, 2).data["t"].tolist()
      [3, 4]
    """

    buffer: Any
    state: Any
    sync: bool = True
    progress: Any = None

    def __post_init__(self) -> None:
        """Refuses what cannot be saved now: threads that orbax started for other items wait 300 s for one that raises later."""
        _alone()
        saving.check_state("fbuf.orbax.SaveArgs", self.buffer, self.state)


@ocp.args.register_with_handler(ReplayHandler, for_restore=True)
@dataclasses.dataclass
class RestoreArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore: `Composite(replay=RestoreArgs(), ...)` gives `(buffer, state)`.

    Attributes:
      buffer, example, verify, resize, progress: As for `fbuf.load`. None as buffer: the one that was saved.
      sharding: Where arrays go: one `jax.sharding.Sharding` for all; or a state like the one asked for (of arrays, or of
        `jax.ShapeDtypeStruct`s or shardings), each of whose leaves says where that leaf goes. None: the default device. Arrays
        are read there first, one after another spread, so the largest must fit.
    """

    buffer: Any = None
    example: Any = None
    verify: str = "full"
    resize: Any = None
    sharding: Any = None
    progress: Any = None


def _given(call: str, kind: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments that orbax passes on."""
    given = kwargs.get("args", args[0] if args else None)
    if given is not None and not isinstance(given, kind):
        raise TypeError(f"{call}: got {type(given).__name__}; expected {kind.__name__}. Write {call}(...).")
    return given


def _alone() -> None:
    if jax.process_count() > 1:
        raise NotImplementedError(
            f"fbuf.orbax: there are {jax.process_count()} processes; expected one. Save each one with fbuf.save, to "
            f"a path of its own."
        )


def _write(directory: Any, arrays: Mapping[str, Any], meta: dict[str, Any], sync: bool, progress: Any) -> None:
    meta["extra"] = meta["replay"] = None
    checkpoint.write(os.fspath(directory), arrays, meta, keep=1, sync=sync, progress=progress)


def _spread(state: BufferState, wanted: Any) -> BufferState:
    """The state with its arrays where they are wanted."""
    if isinstance(wanted, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: jax.device_put(leaf, wanted), state)
    places = {name: getattr(leaf, "sharding", leaf) for name, leaf in named_leaves(wanted).items()}
    out = []
    for name, leaf in named_leaves(state).items():
        place = places.get(name)
        if not isinstance(place, (jax.sharding.Sharding, jax.Device)):
            raise ValueError(
                f"fbuf.orbax.RestoreArgs: sharding has {type(place).__name__} for leaf '{name}'; expected a sharding. Write "
                f"sharding=jax.tree.map(lambda x: x.sharding, state)."
            )
        out.append(jax.device_put(leaf, place))
    return jax.tree.unflatten(jax.tree.structure(state), out)
