"""One buffer in a checkpoint: the sources of its state, and its state from what was saved.

A shard or a buffer of a mixture is saved as one alone, under prefixed names (`sharded`, `mixture`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks, prefetch, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import compatibility, config_json, state_arrays
from fbuf._checkpoint import resize as _resize
from fbuf._checkpoint.device_arrays import DeviceLeaf, PackedSource
from fbuf._checkpoint.parts import device_array, whole_shape
from fbuf._checkpoint.ranges import check_ranges
from fbuf._core import row_schema
from fbuf._core.packed_leaf import PackedLeaf, stored_leaves
from fbuf._core.pytree import Spec
from fbuf._core.row_format import RowFormat
from fbuf._core.slot_remap import Prefix
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf.storages import _array_rows

_STAGES = "state/transforms/read/"
"""Prefix of the state of `on_read`'s stages."""
_MEMORY = Path("/proc/meminfo")
Gathered = tuple[dict[str, Any], dict[str, Any]]
"""Sources by name, and their description for the manifest."""


def gather(buffer: Buffer, state: BufferState) -> Gathered:
    """Return sources by name, and their description for the manifest."""
    state = jax.tree.map(jnp.asarray, state)  # a fetched state has numpy arrays
    jax.block_until_ready(state)  # waits for running writes to host stores
    named = {f"rows/{name}": leaf for name, leaf in buffer.storage.to_arrays(state.rows).items()}
    named |= {f"state/{name}": leaf for name, leaf in state_arrays.to_saved_arrays(buffer, state).items()}
    arrays: dict[str, Any] = {}
    placed: dict[str, list[Any]] = {}
    for name, leaf in named.items():
        if isinstance(leaf, Prefix):
            source: Any = DeviceLeaf(leaf.array, leaf.rows)
        elif isinstance(leaf, PackedLeaf):
            source = PackedSource(leaf)
        elif isinstance(leaf, jax.Array):
            source = DeviceLeaf(leaf)
        else:
            source = np.atleast_1d(leaf) if isinstance(leaf, np.ndarray) else leaf
        arrays[name] = source
        if isinstance(source, DeviceLeaf):
            shape = [leaf.rows] if isinstance(leaf, Prefix) else list(leaf.shape)
            placed[name] = [shape, source.fill.hex()]
        elif leaf.shape == ():  # of a custom storage
            placed[name] = [[], ""]
    spec, structure = buffer.storage.spec(state.rows)
    row_spec = None if buffer.on_write is None else checks.given_spec(buffer, state)
    anchors = state.anchors
    return arrays, {
        "fbuf": str(getattr(sys.modules["fbuf"], "__version__", "unknown")),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "time": time.time(),
        "x64": jax.dtypes.canonicalize_dtype(np.int64) == np.int64,
        "buffer": config_json.to_json(buffer),
        "rows": _schema_json(spec, structure),
        "given": None if row_spec is None else _schema_json(*row_spec),
        "rule": None if anchors is None else config_json.to_json(anchors.rule),
        "placed": placed,
    }


def _schema_json(spec: Any, structure: Any) -> dict[str, Any]:
    return {"leaves": row_schema.leaves(spec), "structure": row_schema.encode(structure)}


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
    is_given = buffer is not None and example is not None
    with rollback(target.storage.folder):
        if (reader.storage, reader.capacity) == (target.storage, target.capacity):
            state = _read(call, saved, reader, spec, structure, was, is_given)
        else:
            with _temporary_reader(reader, target) as reader:
                state = _read(call, saved, reader, spec, structure, was, is_given)
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
    call: str, saved: Any, reader: Buffer, spec: Spec, structure: Any, was: RowFormat | None, is_given: bool
) -> BufferState:
    placed = saved.meta["placed"]
    abstract, wanted = _wanted(call, saved, reader, spec, structure, was)
    _check_sizes(call, saved, reader, wanted, abstract.rows, is_given)
    packings = {n: leaf.packing for n, leaf in stored_leaves(abstract.rows).items() if isinstance(leaf, PackedLeaf)}
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
    try:
        abstract = state_arrays.template(reader, spec, structure, was)
    except ValueError as error:  # its options are damaged, and valid for other rows
        raise checkpoint.SchemaError(
            f"{call}: the buffer saved in {saved.path} cannot hold the rows saved with it ({error}) Load another checkpoint."
        ) from error
    wanted = {f"state/{name}": _shape_of(leaf) for name, leaf in state_arrays.to_saved_arrays(reader, abstract).items()}
    saved_names = {n for n in saved.arrays if n.startswith("state/")}
    if "state/token" in saved_names:
        raise checkpoint.VersionError(f"{call}: {saved.path} was saved by a development version of fbuf.")
    if not reader.prefetch:
        saved_names = {n for n in saved_names if not n.startswith("state/ahead/")}
    saved_names = {
        n for n in saved_names if not n.startswith(_STAGES) or n.removeprefix(_STAGES).split("/")[0] in stages
    }
    found = {
        n: jax.ShapeDtypeStruct(whole_shape(saved, n), saved.arrays[n].dtype) for n in saved.arrays if n in saved_names
    }
    compatibility.check_leaves(call, saved.path, found, wanted)
    return abstract, wanted


def _leaves(saved: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved leaves of a state other than rows."""
    placed = saved.meta["placed"]
    return {n: device_array(saved, n) if n in placed else jnp.array(np.asarray(saved.arrays[n])) for n in wanted}


def _check_sizes(call: str, saved: Any, reader: Buffer, wanted: Mapping[str, Any], rows: Any, is_given: bool) -> None:
    """Raise if arrays are larger than this buffer's, or do not fit into memory."""
    placed = [n for n in saved.arrays if n.startswith("rows/") and n in saved.meta["placed"]]
    claimed = nbytes((whole_shape(saved, n), saved.arrays[n].dtype) for n in placed)
    expected = nbytes((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(rows))
    if claimed > expected and type(reader.storage).__module__.split(".")[0] == "fbuf":
        raise checkpoint.SchemaError(
            f"{call}: {saved.path}: rows take {claimed:,} bytes; expected {expected:,}, as of {reader!r}."
        )
    if not is_given:
        needed = nbytes((leaf.shape, leaf.dtype) for leaf in wanted.values())
        check_memory(call, saved.path, needed + max(claimed, expected), saved.nbytes)


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct((leaf.rows,), leaf.array.dtype) if isinstance(leaf, Prefix) else leaf


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
