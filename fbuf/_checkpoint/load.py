"""`load`: read a generation of a checkpoint folder as a buffer and its state.

Device arrays are created on the device and filled block by block; storages read their host arrays from the files as they
like. Nothing is imported, evaluated or cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import lifetime
from fbuf._buffer import checks, prefetch, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import compatibility, mixture, processes, sharded, state_arrays
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint import resize as _resize
from fbuf._checkpoint.parts import device_array, whole_shape
from fbuf._checkpoint.ranges import check_ranges
from fbuf._checkpoint.save import Progress, checked_path
from fbuf._core.packed_leaf import is_packed
from fbuf._core.pytree import Spec
from fbuf._core.row_format import RowFormat
from fbuf._core.slot_remap import Prefix
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf._members.mixture import Mixture
from fbuf.sharded import Sharded
from fbuf.storages import _array_rows

_STAGES = "state/transforms/read/"
"""Prefix of the state of `on_read`'s stages."""


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
      >>> larger.capacity, larger.last(state, 3).data["t"].tolist()
      (100, [2, 3, 4])
    """
    call = "fbuf.load"

    def restarted(buffer: Any, state: Any) -> tuple[Any, Any]:
        fixed = isinstance(buffer, Buffer) and buffer.writer.read_only
        return buffer, buffer.cut(state) if cut and not fixed else state

    def own(part: Any, buffer: Any, example: Any, size: Any) -> tuple[Buffer, BufferState]:
        return restore_buffer(call, part, buffer, example, size, verify)

    def one(part: Any, buffer: Any, example: Any, size: Any) -> tuple[Any, Any]:
        if isinstance(buffer, Sharded) or "shards" in part.meta:
            return restarted(*sharded.restore(call, part, buffer, example, size, own))
        return restarted(*own(part, buffer, example, size))

    def build(saved: checkpoint.Saved) -> Any:
        values = () if extra is None else (_extra.unpack(call, saved.path, saved, saved.meta["extra"], extra),)
        if "mixture" in saved.meta:
            return *mixture.restore(call, saved, buffer, example, resize, one), *values
        return *one(saved, buffer, example, resize), *values

    def here(build: Any = build) -> Any:
        return load_newest(call, path, verify, progress, build)

    if processes.spans_processes(mixture.mesh_of(buffer)):
        return _load_jointly(call, here, build)
    return here()


def _load_jointly(call: str, load: Callable[..., Any], build: Callable[[checkpoint.Saved], Any]) -> Any:
    """Load in all processes; raise in each if one fails, or finds another generation than the others."""
    group, found = processes.Processes(call), list[checkpoint.Saved]()

    def noted(saved: checkpoint.Saved) -> Any:
        found.append(saved)
        return build(saved)

    made = group.each(lambda: load(noted))
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

    def checked(saved: checkpoint.Saved) -> Any:
        one = saved.meta.keys() >= {"buffer", "rows", "rule", "placed", "extra", "replay"}
        if not one and not any(saved.meta.keys() >= keys for keys in (mixture.KEYS, sharded.KEYS)):
            raise checkpoint.SchemaError(f"{call}: {saved.path} holds no buffer. Give a path that fbuf.save wrote.")
        try:
            return build(saved)
        except (checkpoint.SchemaError, checkpoint.VersionError):
            raise
        except (*_RAW, TypeError, ValueError) as error:
            own = _PREFIX.match(str(error))
            if isinstance(error, TypeError | ValueError) and own and own[1] not in _STORES:  # of an argument, or clear
                raise
            raise checkpoint.SchemaError(
                f"{call}: the buffer's description in {saved.path} is invalid ({error!r})."
            ) from error

    return checkpoint.restore(checked_path(call, path), checked, verify=verify, progress=progress)


def restore_buffer(
    call: str, saved: Any, buffer: Any, example: Any, resize: Any, verify: Any
) -> tuple[Buffer, BufferState]:
    """Return the buffer and its state."""
    path, meta = saved.path, saved.meta
    reader, target, keeps_ahead = compatibility.match(call, path, meta, buffer, resize)
    spec, structure, was = compatibility.rows_of(call, path, meta, reader, example)
    checks.check_fields(call, target, spec)
    target.storage.host_keys(spec)
    if verify == "full" and target.storage.folder is not None:
        saved.verify()  # before files are created, which would block a second try
    given = buffer is not None and example is not None
    with rollback(target.storage.folder):
        if (reader.storage, reader.capacity) == (target.storage, target.capacity):
            state = _read(call, saved, reader, spec, structure, was, given)
        else:
            with _temporary_reader(reader, target) as reader:
                state = _read(call, saved, reader, spec, structure, was, given)
                state = _resize.resize_state(f"{call}: {path}", reader, target, state)
        compatibility.check_ragged(call, path, target, example, state.rows)
        if reader.on_read != target.on_read:
            before = dataclasses.replace(target, on_read=reader.on_read, prefetch=0, batch_size=None)
            state = transforms.fit_transforms(target, dataclasses.replace(state, ahead=None), since=before)
        if not keeps_ahead:
            state = dataclasses.replace(state, ahead=None)
            state = dataclasses.replace(state, ahead=prefetch.empty_prefetch(target, state))
        if not checks.fits(target, state):
            raise checkpoint.SchemaError(
                f"{call}: the state in {path} has leaves of other shapes than those of {target!r}. Load another checkpoint."
            )
    return target, state


@contextlib.contextmanager
def _temporary_reader(reader: Buffer, target: Buffer) -> Iterator[Buffer]:
    """Yield the reader, with rows in a temporary folder if it stores them in files."""
    storage: Any = reader.storage
    if storage.folder is None:
        yield reader
        return
    folder = target.storage.folder
    where = None if folder is None else os.path.dirname(os.path.abspath(folder))
    with tempfile.TemporaryDirectory(prefix="fbuf-", dir=where) as folder:
        yield dataclasses.replace(reader, storage=dataclasses.replace(storage, path=os.path.join(folder, "rows")))


def _read(
    call: str, saved: Any, reader: Buffer, spec: Spec, structure: Any, was: RowFormat | None, given: bool
) -> BufferState:
    placed = saved.meta["placed"]
    abstract, wanted = _wanted(call, saved, reader, spec, structure, was)
    _check_sizes(call, saved, reader, wanted, abstract.rows, given)
    packings = {n: leaf.packing for n, leaf in _array_rows.stored_leaves(abstract.rows).items() if is_packed(leaf)}
    rows = {}
    for whole_name, array in saved.arrays.items():
        if whole_name.startswith("rows/"):
            name = whole_name.removeprefix("rows/")
            made = device_array(saved, whole_name, packings.get(name)) if whole_name in placed else None
            rows[name] = array if made is None else _array_rows.OwnedArray(made)
    leaves = _leaves(saved, wanted)
    stored = reader.storage.from_arrays(rows, reader.geometry, spec, structure)
    return check_ranges(call, saved.path, reader, state_arrays.from_saved_arrays(reader, abstract, leaves, stored))


def read_without_rows(call: str, saved: Any) -> tuple[Buffer, BufferState]:
    """Return the saved buffer and its state with `rows` None, as `restore_buffer` would: flags and priorities only."""
    reader = compatibility.match(call, saved.path, saved.meta, None, None).reader
    spec, structure, was = compatibility.rows_of(call, saved.path, saved.meta, reader, None)
    abstract, wanted = _wanted(call, saved, reader, spec, structure, was)
    check_memory(call, saved.path, nbytes((leaf.shape, leaf.dtype) for leaf in wanted.values()), saved.nbytes)
    state = state_arrays.from_saved_arrays(reader, abstract, _leaves(saved, wanted), None)
    return reader, check_ranges(call, saved.path, reader, state)


def _wanted(
    call: str, saved: Any, reader: Buffer, spec: Spec, structure: Any, was: RowFormat | None
) -> tuple[BufferState, dict[str, Any]]:
    """Return the shapes of a state, and those of its saved leaves other than rows by name; raise if others are saved."""
    stages = () if reader.on_read is None else reader.on_read.names
    abstract = state_arrays.template(reader, spec, structure, was)
    wanted = {f"state/{name}": _shape_of(leaf) for name, leaf in state_arrays.to_saved_arrays(reader, abstract).items()}
    there = {n for n in saved.arrays if n.startswith("state/")}
    if "state/token" in there:
        raise checkpoint.VersionError(f"{call}: {saved.path} was saved by a development version of fbuf.")
    if not reader.prefetch:
        there = {n for n in there if not n.startswith("state/ahead/")}
    there = {n for n in there if not n.startswith(_STAGES) or n.removeprefix(_STAGES).split("/")[0] in stages}
    found = {n: jax.ShapeDtypeStruct(whole_shape(saved, n), saved.arrays[n].dtype) for n in saved.arrays if n in there}
    compatibility.check_leaves(call, saved.path, found, wanted)
    return abstract, wanted


def _leaves(saved: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved leaves of a state other than rows."""
    placed = saved.meta["placed"]
    return {n: device_array(saved, n) if n in placed else jnp.array(np.asarray(saved.arrays[n])) for n in wanted}


def _check_sizes(call: str, saved: Any, reader: Buffer, wanted: Mapping[str, Any], rows: Any, given: bool) -> None:
    """Raise if arrays are larger than this buffer's, or do not fit into memory."""
    there = [n for n in saved.arrays if n.startswith("rows/") and n in saved.meta["placed"]]
    claimed = nbytes((whole_shape(saved, n), saved.arrays[n].dtype) for n in there)
    expected = nbytes((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(rows))
    if claimed > expected and type(reader.storage).__module__.split(".")[0] == "fbuf":
        raise checkpoint.SchemaError(
            f"{call}: {saved.path}: rows take {claimed:,} bytes; expected {expected:,}, as of {reader!r}."
        )
    if not given:
        needed = nbytes((leaf.shape, leaf.dtype) for leaf in wanted.values())
        check_memory(call, saved.path, needed + max(claimed, expected), saved.nbytes)


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct((leaf.rows,), leaf.array.dtype) if isinstance(leaf, Prefix) else leaf


_RAW = (KeyError, IndexError, AttributeError, RecursionError, ArithmeticError)
"""Errors of code that reads what no buffer wrote."""
_PREFIX = re.compile(r"([\w.]+): ")
_STORES = ("Store.from_arrays", "Records.from_arrays", "Deduplicated")
"""Prefixes of errors that name no path."""
_MEMORY = Path("/proc/meminfo")


def nbytes(arrays: Iterable[tuple[Iterable[int], Any]]) -> int:
    """Return the bytes of arrays of given shapes and dtypes."""
    return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in arrays)


def check_memory(call: str, path: str, needed: int, stored: int) -> None:
    """Raise MemoryError if a state needs more than is free on the CPU; other devices report it themselves."""
    free = _free_memory() if jax.default_backend() == "cpu" else None
    if free is not None and needed > free:
        raise MemoryError(
            f"{call}: the state in {path} takes {needed:,} bytes, of which {stored:,} are stored; {free:,} are free. Free "
            f"memory, or write {call}(path, buffer, example=row) if that size is right."
        )


def _free_memory() -> int | None:
    """Return the bytes that the system can provide, swap included; None if unknown."""
    try:
        lines = [line.split() for line in _MEMORY.read_text().splitlines()]
        sizes = {words[0]: int(words[1]) * 1024 for words in lines}
        return sizes["MemAvailable:"] + sizes["SwapFree:"]
    except (OSError, LookupError, ValueError):
        return None
