"""`save`: write a state as named arrays and a manifest, one generation of a checkpoint folder.

Device arrays are stored as far as they were written; host stores provide their own arrays (`to_arrays`). With `wait=False`
the changed blocks are copied first, since the state may be donated as soon as `save` returns.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fbuf._bridge import lifetime
from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import async_save, mixture, plain, processes, sharded, state_arrays
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint.async_save import Saving
from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._formats import checkpoint
from fbuf._members.mixture import Mixture
from fbuf.sharded import Sharded, ShardedState
from fbuf.sharded import _checks as sharded_checks

Progress = Callable[[int, int], None]
_USAGE = {"Replay": "replay.save(path)"}
"""The right call, by the class of objects that contain a buffer."""
_OF_SHARD = re.compile(r"(buffers/\d+/)?shards/")


def save(
    path: str | os.PathLike[str],
    buffer: Buffer | Mixture | Sharded,
    state: BufferState | ShardedState | Mapping[str, BufferState | ShardedState],
    *,
    keep: int = 2,
    extra: Any = None,
    wait: bool = True,
    sync: bool = True,
    progress: Progress | bool | None = None,
) -> Saving:
    """Save a buffer and its state: rows, priorities, counters, prefetched batches, everything.

    A loaded buffer continues with the same batches, bit for bit. A second save to the same path writes what is new. A process
    killed at any moment leaves the last complete checkpoint. The format is described in `fbuf/FORMAT.md`.

    Args:
      path: A folder; created if missing. Save repeatedly to one path.
      buffer: The buffer, a `Mixture`, or a `Sharded`; its configuration is saved too. Custom functions
        (`views.Hindsight`, `storages.Ragged(encode=...)`) and parts are saved by name; `load` then needs the buffer.
      state: Its state: concrete, and not donated. Of an old state, rows that have expired on the host are missing.
      keep: Number of generations to keep, this one included.
      extra: A pytree of arrays, PRNG keys, numbers and text to save with it, as in `{"key": key, "step": 1000}`.
      wait: False: return once the changes since the last save are copied, so that the state may be donated, and write in a
        thread. An error is raised by `Saving.result`, else by the next save to that path, else printed when the process ends,
        which waits for its saves. A save waits for a running save to the same path, of any thread.
        Not if the state is spread over processes.
      sync: Wait for the disk. False: safe if the process is killed, not if power fails.
      progress: True for a bar, or a callable of (bytes done, bytes in all).
    Returns:
      A handle: `result()` returns how much was written.
    Raises:
      TypeError: the call or the state is traced, or a plain state is spread over processes; or it holds objects without
        bytes (in `storages.Ragged`).
      RuntimeError: the state was donated.
      ValueError: another buffer made it.
      OSError: the disk is full or fails; the checkpoint before is intact. BlockingIOError: another process saves there.
      RuntimeError: the save failed in another process; the checkpoint before is intact.

    If a sharded buffer is spread over processes, each of them calls `save` with the same path, in a folder that all see. Each
    writes its shards, and one checkpoint of all is complete when the call returns. `extra` is that of process 0.

    Cost: new blocks are written once. Arrays on a CPU and of host stores without versions are read and compared; those on an
      accelerator are hashed there, and only changed blocks are fetched. Memory: a block; with `wait=False` all changes.

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
    return start_save("fbuf.save", path, buffer, state, None, extra, wait, keep=keep, sync=sync, progress=progress)


def start_save(
    call: str,
    path: Any,
    buffer: Any,
    state: Any,
    replay: tuple[Any, Any] | None,
    extra: Any,
    wait: bool,
    **settings: Any,
) -> Saving:
    """Save as `save` does, with arrays and a note of the caller's; `settings` are keep, sync and progress."""
    folder = checked_path(call, path)
    check_state(call, buffer, state)
    with async_save.exclusive_save(folder):
        arrays, meta = gather(buffer, state)
        extra_arrays, meta["extra"] = ({}, None) if extra is None else _extra.pack(call, extra)
        replay_arrays, meta["replay"] = ({}, None) if replay is None else replay
        arrays |= extra_arrays | replay_arrays
        if processes.spans_processes(mixture.mesh_of(buffer)):
            return _save_jointly(call, folder, arrays, meta, wait, settings)
        if not wait:  # host stores' own arrays stay valid when the state is donated; those of custom storages may not
            custom_rows = _custom_row_prefixes(buffer)
            arrays = checkpoint.snapshot(
                folder, arrays, lambda name, source: isinstance(source, DeviceLeaf) or name.startswith(custom_rows)
            )
        work = functools.partial(checkpoint.write, folder, arrays, meta, **settings)
        return Saving(folder, work, wait=wait)


def _save_jointly(
    call: str, folder: str, arrays: dict[str, Any], meta: dict[str, Any], wait: bool, settings: dict[str, Any]
) -> Saving:
    """Save the shards of this process, and those of all others."""
    if not wait:
        raise ValueError(
            f"{call}: wait is False, but the state is spread over {jax.process_count()} processes, which write together. Use "
            f"wait=True."
        )
    group = processes.Processes(call)
    if group.index:  # the first process saves what all have
        arrays = {name: source for name, source in arrays.items() if _OF_SHARD.match(name)}
    work = functools.partial(checkpoint.write_jointly, folder, arrays, meta, group, sharded.join_meta, **settings)
    return Saving(folder, work, wait=True)


def _custom_row_prefixes(buffer: Any) -> tuple[str, ...]:
    """Return the prefixes of arrays of custom storages."""
    if mixture.mesh_of(buffer) is not None:
        return ()  # the storages are fbuf's
    members = {"": buffer} if isinstance(buffer, Buffer) else mixture.buffers_by_prefix(buffer)
    return tuple(f"{begin}rows/" for begin, b in members.items() if type(b.storage).__module__.split(".")[0] != "fbuf")


def checked_path(call: str, path: Any) -> str:
    """Return a path as text."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"{call}: path is {path!r}; expected a folder. Write {call}('/data/checkpoint', ...).")
    return os.path.abspath(os.path.expanduser(str(os.fspath(path))))


def check_state(call: str, buffer: Any, state: Any) -> None:
    """Raise if the state cannot be saved, before anything is written."""
    if isinstance(buffer, Mixture):
        mixture.check_states(call, buffer, state)
        for name, member in buffer.members:
            _check_member(call, member, state[name])
    else:
        _check_member(call, buffer, state)


def _check_member(call: str, buffer: Any, state: Any) -> None:
    """Raise if the state of a buffer, plain or sharded, cannot be saved."""
    usage = f"{call}(buffer, state)" if call.endswith("SaveArgs") else f"{call}(path, buffer, state)"
    if isinstance(buffer, Sharded):
        if not isinstance(state, ShardedState):
            raise TypeError(f"{call}: state is {type(state).__name__}; expected a ShardedState. Write {usage}.")
        _check_leaves(call, usage, state)
        sharded_checks.check_made_by(call, buffer, state)
        return
    if not isinstance(buffer, Buffer):
        write = _USAGE.get(type(buffer).__name__, usage)
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer. Write {write}.")
    if not isinstance(state, BufferState):
        raise TypeError(f"{call}: state is {type(state).__name__}; expected a BufferState. Write {usage}.")
    _check_leaves(call, usage, state)
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)):
        raise TypeError(f"{call}: the state is spread over several processes. Gather it with process_allgather.")
    checks.check_made_by(buffer, state, call)
    if state_arrays.has_custom_host_state(buffer):
        raise TypeError(f"{call}: {buffer.sampler!r} keeps state on the host. Use one whose state is arrays.")


def _check_leaves(call: str, usage: str, state: Any) -> None:
    """Raise if leaves are not arrays that can be read."""
    leaves = jax.tree.leaves(state)
    if lifetime.traced() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(f"{call}: the call or the state is traced. Call it outside jit, with the returned state.")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TypeError(f"{call}: the state contains shapes; expected arrays. Save a state that a method returned.")
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(leaf.is_deleted() for leaf in arrays):
        raise RuntimeError(f"{call}: the state was donated. Save what the step returned; {usage}.")


def gather(buffer: Any, state: Any) -> plain.Gathered:
    """Return sources by name, and their description for the manifest."""
    return (mixture if isinstance(buffer, Mixture) else sharded).gather(buffer, state)
