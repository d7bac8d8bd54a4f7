"""`save`: a state becomes named arrays and a manifest, and these a generation of a checkpoint folder.

What of a state is an array on the device is stored as far as it was written; what lies on the host is the store's business
(`to_arrays`). With `wait=False` that which the last save has not yet is copied first, since a state may be donated the moment
`save` returns.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import lifetime
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import async_save, config_json, mixture, row_schema, state_arrays
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint.async_save import Saving, Snapshot
from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._formats import checkpoint
from fbuf._mixture import Mixture, MixtureState

Progress = Callable[[int, int], None]
_INSTEAD = {"Replay": "replay.save(path)", "Checked": "fbuf.save(path, checked.buffer, state)"}
"""What to write for what is not a buffer, but has one."""


def save(
    path: str | os.PathLike[str],
    buffer: Buffer | Mixture,
    state: BufferState | MixtureState,
    *,
    keep: int = 2,
    extra: Any = None,
    wait: bool = True,
    sync: bool = True,
    progress: Progress | bool | None = None,
) -> Saving:
    """Saves a buffer and its state: rows, priorities, counters, what was drawn ahead, everything.

    What is loaded goes on with the same batches, bit for bit. A second save to the same path writes what is new; a process
    that is killed at any moment leaves the last checkpoint that was whole. The format is described in `fbuf/FORMAT.md`.

    Args:
      path: A folder; made if it is not there. One path, many saves.
      buffer: The buffer, or a `Mixture`; its configuration is saved too. Functions of yours (`views.Hindsight`,
        `storages.Ragged(encode=...)`) and parts of yours are noted by name; `load` then asks for the buffer.
      state: Its state: concrete, and not donated. Any state of it, also an old one (rows of a host storage that have expired
        are missing then, as they are missing now).
      keep: Generations that stay, this one included.
      extra: A pytree of arrays, PRNG keys, numbers and text to save beside it, as in `{"key": key, "step": 1000}`.
      wait: False: returns as soon as what changed since the last save is copied, so that the state may be donated, and
        writes in a thread. An error is raised by `Saving.result`, else by the next save to that path, else it is printed
        when the process ends, which waits for its saves. A save to a path waits for the one under way there, of any thread.
      sync: Wait for the disk. False: killed processes do no harm, a failure of power may.
      progress: True for a bar, or a callable that is given bytes done and bytes in all.
    Returns:
      A handle: `result()` says how much was written.
    Raises:
      TypeError: the call or the state is traced, or spread over processes; or holds what has no bytes (objects in
        `storages.Ragged`).
      RuntimeError: the state was donated.
      ValueError: another buffer made it.
      OSError: the disk is full or fails; the checkpoint before is whole. BlockingIOError: another process saves there.
    Cost: what is new is written once. Arrays on a CPU and of host stores without versions are read and compared; those on an
      accelerator are summed up there, and only what changed is fetched. Memory: a block; with `wait=False` all that is new.

    Example:
      >>> import fbuf, tempfile, jax, jax.numpy as jnp
      >>> buffer = fbuf.prioritized(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fbuf.save(f"{folder}/replay", buffer, state, extra={"step": 7})
      ...     same, again, extra = fbuf.load(f"{folder}/replay", extra=True)
      >>> same == buffer, extra, again.sampler.tree.shape == state.sampler.tree.shape
      (True, {'step': 7}, True)
    """
    return saved("fbuf.save", path, buffer, state, None, keep, extra, wait, sync, progress)


def saved(
    call: str,
    path: Any,
    buffer: Any,
    state: Any,
    own: tuple[dict[str, Any], Any] | None,
    keep: int,
    extra: Any,
    wait: bool,
    sync: bool,
    progress: Any,
) -> Saving:
    """`save`, with arrays and a note of who calls it besides."""
    folder = checked_path(call, path)
    check_state(call, buffer, state)
    with async_save.turn(folder):
        arrays, meta = gathered(call, buffer, state)
        beside, meta["extra"] = ({}, None) if extra is None else _extra.pack(call, extra)
        mine, meta["replay"] = ({}, None) if own is None else own
        arrays |= beside | mine
        sources = arrays if wait else _kept(folder, arrays, _rows_of_theirs(buffer))
        work = functools.partial(checkpoint.write, folder, sources, meta, keep=keep, sync=sync, progress=progress)
        return Saving(folder, work, wait=wait)


def _rows_of_theirs(buffer: Buffer | Mixture) -> tuple[str, ...]:
    """What names of arrays begin with that are of a user's own storages."""
    members = {"": buffer} if isinstance(buffer, Buffer) else mixture.by_prefix(buffer)
    return tuple(f"{begin}rows/" for begin, b in members.items() if type(b.storage).__module__.split(".")[0] != "fbuf")


def _kept(folder: str, arrays: Mapping[str, Any], theirs: tuple[str, ...]) -> dict[str, Any]:
    """Sources that stay as they are when the state is donated: a host store's are so anyhow, but perhaps not a user's own
    storage's (`theirs`)."""

    def held(name: str, source: Any, last: Any) -> Any:
        loose = isinstance(source, DeviceLeaf) or name.startswith(theirs)
        return Snapshot(name, source, last) if loose else source

    try:
        saved = checkpoint.read(folder, verify="lazy")
    except (checkpoint.CheckpointNotFound, checkpoint.StoreCorrupted):
        return {name: held(name, source, None) for name, source in arrays.items()}
    with saved:
        return {name: held(name, source, saved.arrays.get(name)) for name, source in arrays.items()}


def checked_path(call: str, path: Any) -> str:
    """A path as text."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise TypeError(
            f"{call}: path is {path!r}; expected the path of a folder. Write {call}('/data/checkpoint', ...)."
        )
    return os.path.abspath(os.path.expanduser(str(os.fspath(path))))


def check_state(call: str, buffer: Any, state: Any) -> None:
    """Refuses what cannot be saved, before anything is done."""
    if isinstance(buffer, Mixture):
        mixture.check_state(call, buffer, state, check_state)
        return
    usage = f"{call}(buffer, state)" if call.endswith("SaveArgs") else f"{call}(path, buffer, state)"
    if not isinstance(buffer, Buffer):
        write = _INSTEAD.get(type(buffer).__name__, usage)
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer. Write {write}.")
    if not isinstance(state, BufferState):
        raise TypeError(f"{call}: state is {type(state).__name__}; expected a BufferState. Write {usage}.")
    leaves = jax.tree.leaves(state)
    if lifetime.traced() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{call}: the call or the state is traced, but files are written once, not as a program runs; expected arrays. "
            f"Call it outside jit, scan and vmap, with the state that came out of them."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(f"{call}: the state has shapes in it; expected arrays. Save what init or a verb returned.")
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in arrays):
        raise RuntimeError(
            f"{call}: the state was donated, and its arrays are gone; expected one that is not. Save the state that the step "
            f"returned: state = step(state); {usage}."
        )
    if not all(leaf.is_fully_addressable for leaf in arrays):
        raise TypeError(
            f"{call}: the state is spread over several processes; expected one that this process can read whole. Gather it: "
            f"jax.experimental.multihost_utils.process_allgather(state, tiled=True)."
        )
    buffer.check_state(state)
    if state_arrays.keeps_elsewhere(buffer):
        raise TypeError(
            f"{call}: {buffer.sampler!r} keeps part of its state on the host, and cannot say what; expected one of fbuf's "
            f"samplers, or one whose state is arrays."
        )


def gathered(call: str, buffer: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sources by name, and what the manifest says of them; of a buffer, or of a mixture."""
    if isinstance(buffer, Mixture):
        return mixture.gathered(buffer, state, _gathered)
    return _gathered(buffer, state)


def _gathered(buffer: Buffer, state: BufferState) -> tuple[dict[str, Any], dict[str, Any]]:
    state = jax.tree.map(jnp.asarray, state)  # one that was fetched has numpy's
    jax.block_until_ready(state)  # what is being written to a store is there then
    named = {f"rows/{name}": leaf for name, leaf in buffer.storage.to_arrays(state.rows).items()}
    named |= {f"state/{name}": leaf for name, leaf in state_arrays.packed(buffer, state).items()}
    arrays: dict[str, Any] = {}
    placed: dict[str, list[Any]] = {}
    for name, leaf in named.items():
        if isinstance(leaf, state_arrays.Prefix):
            source: Any = DeviceLeaf(leaf.array, leaf.rows)
        elif isinstance(leaf, jax.Array):
            source = DeviceLeaf(leaf)
        else:
            source = np.atleast_1d(leaf) if isinstance(leaf, np.ndarray) else leaf
        arrays[name] = source
        if isinstance(source, DeviceLeaf):
            shape = list(leaf.shape) if isinstance(leaf, jax.Array) else [leaf.rows]
            placed[name] = [shape, source.fill.hex()]
        elif leaf.shape == ():  # of a storage of the user's own
            placed[name] = [[], ""]
    spec, structure = buffer.storage.spec(state.rows)
    given = None if buffer.on_write is None else buffer.given_spec(state)
    anchors = state.anchors
    return arrays, {
        "fbuf": _version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "time": time.time(),
        "x64": jax.dtypes.canonicalize_dtype(np.int64) == np.int64,
        "buffer": config_json.describe(buffer),
        "rows": {"leaves": row_schema.leaves(spec), "structure": row_schema.encode(structure)},
        "given": None
        if given is None
        else {"leaves": row_schema.leaves(given[0]), "structure": row_schema.encode(given[1])},
        "rule": None if anchors is None else config_json.describe(anchors.rule),
        "placed": placed,
    }


def _version() -> str:
    return str(getattr(sys.modules["fbuf"], "__version__", "unknown"))
