"""`load`: read a generation of a checkpoint folder as a buffer and its state.

Device arrays are created on the device and filled block by block; storages read their host arrays from the files as they
like. Nothing is imported, evaluated or cast.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from typing import Any, Literal

from fbuf._bridge import lifetime
from fbuf._buffer.buffer import Buffer
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint import mixture, processes, sharded
from fbuf._checkpoint.save import Progress, checked_path
from fbuf._formats import checkpoint
from fbuf._members.mixture import Mixture
from fbuf.sharded import Sharded


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
            # An error about an argument, or one that is clear already.
            if isinstance(error, TypeError | ValueError) and match and match[1] not in _STORES:
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
