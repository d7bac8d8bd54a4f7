"""`save`: write a state as named arrays and a manifest, one generation of a checkpoint folder; `load`: read one.

Device arrays are stored as far as they were written; host stores provide their own arrays (`to_arrays`). With `wait=False`
the changed blocks are copied first, since the state may be donated as soon as `save` returns. A load creates device arrays on
the device and fills them block by block; storages read their host arrays from the files as they like. Nothing is imported,
evaluated or cast.
"""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

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


def load(
    path: str | os.PathLike[str],
    buffer: Buffer | Mixture | Sharded | None = None,
    *,
    example: Any = None,
    verify: Literal["full", "lazy"] = "full",
    resize: Any = None,
    extra: Any = None,
    progress: Progress | bool | None = None,
    cut: bool = False,
) -> Any:
    """Load what `save` saved: `(buffer, state)`, or with `extra` `(buffer, state, extra)`.

    The newest complete generation is loaded; a RuntimeWarning says if a newer one is damaged. Arrays are placed on the default
    device, whatever their sharding was (`jax.device_put(state, ...)` distributes them); host stores are new and of this
    process. Batches continue bit for bit, given the same keys.

    Args:
      path: The folder. For a saved `Mixture`, `buffer` is a mixture with the same names, `example` and `resize` are dicts by
        name, and the following holds for each of its buffers. For a `sharded.Sharded` see below.
      buffer: None: the saved one. Otherwise the buffer to load into; it may differ in settings that the state does not depend
        on: the view's output (`gamma`, ...), `prefetch` and `batch_size` (the prefetched batch is then dropped), settings of
        draws (`stratified`, `replace`, `drop_last`, ...), where priorities are (`on`), and the path of its files. Annealed
        numbers (`alpha`, `beta`, ...) are those of the state; `buffer.set` changes them. With another storage the rows are
        rewritten in order, at the cost of adding them. Required if custom functions or parts were saved: they are saved by
        name, and nothing is imported.
      example: One row, as for `Buffer.init`; only required for rows with custom nodes (a NamedTuple, a registered dataclass).
        If given, rows must be like it.
      verify: "full": check every byte first. "lazy": check each block when it is read; a damaged one then raises
        StoreCorrupted.
      resize: Another capacity, larger or smaller; True for the given buffer's. The newest rows stay, with their priorities,
        episodes and numbers, in other slots: old indices are stale and the prefetched batch is dropped. Samplers without
        replacement continue, but an epoch with more anchors than the new capacity restarts.
      extra: Also return what was saved with `extra=`: True as it was saved, or an example with the structure to return.
      progress: True for a bar, or a callable of (bytes done, bytes in all).
      cut: True if the environments start again: `Buffer.cut` all lanes. Otherwise the next rows continue the last episodes.
    Raises:
      CheckpointNotFound (a FileNotFoundError): there is none.
      StoreCorrupted (a RuntimeError): no generation is complete.
      SchemaError (a ValueError): it is incompatible; the message has the path, what was found and expected, and the fix.
      VersionError (a ValueError): a later release saved it, or an earlier one with a setting that was removed.
      TypeError: the call is traced.
      MemoryError: the state needs more memory than is free (on a CPU; not checked if buffer and example are given).
      FileExistsError, BlockingIOError: the path of the buffer's files is in use: use another path.
      OSError: the disk fails, also when a read is repeated. Nothing is known of the bytes, so no older generation is loaded.

    A sharded buffer loads on any number of shards and processes, `fbuf.load(path, Sharded(buffer, mesh))`, and as a plain
    buffer on one device, `fbuf.load(path)`; a plain one loads as a `Sharded`. On the saved number of shards the state is the
    same bit for bit. On another all rows are kept, with their lanes, order and priorities; indices become stale, and an epoch
    restarts. Without lanes, rows of several shards are merged by age. Mixtures of plain and of sharded buffers
    load as one another alike. Each process calls `load`; it makes its own shards, and checks every byte with "full".

    Cost: each byte is read once; twice with "full" if rows are stored in files. Memory: the state, and a few blocks; twice the
      state if it is resized.

    Example:
      >>> import fbuf, tempfile, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(3)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fbuf.save(folder, buffer, state)
      ...     larger, state = fbuf.load(folder, resize=100)
      >>> larger.capacity, larger.rows(state, last=3).data["t"].tolist()
      (100, [2, 3, 4])
    """
    call = "fbuf.load"

    def build(saved: checkpoint.Saved) -> Any:
        values = () if extra is None else (_extra.unpack(call, saved.path, saved, saved.meta["extra"], extra),)
        restore = mixture.restore if "mixture" in saved.meta else sharded.restore
        return *restore(call, saved, buffer, example, resize, verify, cut), *values

    run = _load_jointly if processes.spans_processes(mixture.mesh_of(buffer)) else load_newest
    return run(call, path, verify, progress, build)


def _load_jointly(call: str, path: Any, verify: Any, progress: Any, build: Callable[[checkpoint.Saved], Any]) -> Any:
    """Load in all processes; raise in each if one fails, or finds another generation than the others."""
    group, found = processes.Processes(call), list[checkpoint.Saved]()

    def noted(saved: checkpoint.Saved) -> Any:
        found.append(saved)
        return build(saved)

    made = group.each(lambda: load_newest(call, path, verify, progress, noted))
    id = zlib.crc32(found[-1].manifest.save.encode()) & 0x7FFFFFFF
    if (group.gather(id) != id).any():
        raise checkpoint.StoreCorrupted(
            f"{call}: processes loaded different generations of {found[-1].path}, since some found damage. Remove the damaged "
            f"manifest, or use verify='full'."
        )
    return made


def load_newest(call: str, path: Any, verify: Any, progress: Any, build: Callable[[checkpoint.Saved], Any]) -> Any:
    """Return what `build` makes of the newest complete generation.

    Raises:
      SchemaError: the checkpoint holds something else.
      TypeError: the call is traced.
    """
    if lifetime.traced():
        raise TypeError(f"{call}: the call is traced. Call it outside jit, and pass the state in.")
    of_caller = list[Exception]()

    def told(done: int, total: int) -> None:
        try:
            progress(done, total)
        except Exception as error:
            of_caller.append(error)
            raise

    def checked(saved: checkpoint.Saved) -> Any:
        one = saved.meta.keys() >= {"buffer", "rows", "rule", "placed", "extra", "replay"}
        if not one and not any(saved.meta.keys() >= keys for keys in (mixture.KEYS, sharded.KEYS)):
            raise checkpoint.SchemaError(f"{call}: {saved.path} holds no buffer. Give a path that fbuf.save wrote.")
        try:
            return build(saved)
        except (checkpoint.SchemaError, checkpoint.VersionError):
            raise
        except (*_RAW, TypeError, ValueError) as error:
            match = _PREFIX.match(str(error))
            if (
                isinstance(error, TypeError | ValueError) and match and match[1] not in _STORES
            ):  # of an argument, or clear
                raise
            if error in of_caller:
                raise
            raise checkpoint.SchemaError(
                f"{call}: the buffer's description in {saved.path} is invalid ({error!r})."
            ) from error

    return checkpoint.restore(
        checked_path(call, path), checked, verify=verify, progress=told if callable(progress) else progress
    )


_RAW = (KeyError, IndexError, AttributeError, RecursionError, ArithmeticError)
"""Errors of code that reads what no buffer wrote."""
_PREFIX = re.compile(r"([\w.]+): ")
_STORES = ("Store.from_arrays", "Records.from_arrays", "Deduplicated")
"""Prefixes of errors that name no path."""
