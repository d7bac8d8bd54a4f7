"""Fill buffers from arrays in memory, anything that slices like them, or one `.npz` or `.h5` file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._core.pytree import named_leaves
from fbuf.interop import _export, _guards, _hdf5, _npz
from fbuf.interop._columns import DTYPES, Column, Fields, Source, check_count, choose_leaves, column_of, row_count
from fbuf.interop._export import FORMAT, VERSION
from fbuf.interop._fill import fill

_CALL = "from_file"
Reader = _npz.Reader | _hdf5.Reader


def from_file(
    path: str | os.PathLike[str],
    *,
    buffer: Buffer | None = None,
    lanes: int | None = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    newest: int | None = None,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Fill a buffer with the rows of one `.npz` or `.h5`, oldest first.

    Args:
      path: A file of `to_file` or `to_ted`; or any arrays `[N, ...]`, with lanes `[N, E, ...]`, of little-endian numbers in C
        order (in HDF5 all data sets of the file).
      buffer: The buffer to fill; None: one with room for exactly these rows.
      lanes: E, for another program's arrays `[N, E, ...]`.
      fields: `{name there: name here}`, or names; "ted": `interop.TED`, each observation once and scalars without their last
        axis; None: all.
      dtypes, newest, progress: As for `from_arrays`.
    Returns:
      The buffer, and its state.
    Raises:
      FileNotFoundError: the file is missing.
      ImportError: h5py is missing.
      ValueError: the file is damaged, truncated or inconsistent; it has pickles or links that `fields` does not leave out;
        else as
        `from_arrays`. The zip's checksums detect damage of an npz while its bytes are read.
    Cost: O(N), in blocks of about 8 MiB.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(f"{folder}/data.npz", observations=np.ones((5, 3), np.float32), actions=np.arange(5))
      ...     names = {"observations": "obs", "actions": "action"}
      ...     buffer, state = fbuf.interop.from_file(f"{folder}/data.npz", fields=names)
      >>> buffer.last(state, 2).data["action"].tolist()
      [3, 4]
    """
    with opened(_CALL, path := Path(path)) as reader:
        source = _source(path, reader, lanes if lanes is not None or buffer is None else buffer.lanes, fields)
        return fill(_CALL, source, buffer, fields=fields, dtypes=dtypes, newest=newest, progress=progress)


def opened(call: str, path: Path) -> contextlib.closing[Reader]:
    """Open the arrays of a file, by its ending."""
    if path.suffix not in (".npz", *_export.H5):
        raise ValueError(f"{call}: {path} ends in {path.suffix!r}; expected .npz, .h5 or .hdf5.")
    reader: Reader = _npz.Reader(path) if path.suffix == ".npz" else _hdf5.Reader(path, call)
    return contextlib.closing(reader)


def columns_of(path: Path, reader: Reader, lanes: int | None = None) -> tuple[dict[str, Column], dict[str, Any] | None]:
    """Return the columns of a file, and its description if `to_file` or `to_ted` wrote it."""
    about = _about(path, reader)
    columns = {name: reader.columns[name] for name in sorted(reader.columns) if name != _npz.ABOUT}
    if about is not None:
        lanes = about["lanes"]
        if other := sorted(columns.keys() ^ set(about["columns"])):
            raise ValueError(f"{path}: column '{other[0]}' is missing or unknown. The file is damaged.")
    side = () if lanes is None else (lanes,)
    for name, column in columns.items():
        steps = column.rows if about is None else about["steps"]
        if not column.refused and (column.rows != steps or column.shape[: len(side)] != side):
            shape = [column.rows, *column.shape]
            raise ValueError(f"{path}: '{name}' has shape {shape}; expected {[steps, *side, '...']}. Pass lanes=E.")
        column = dataclasses.replace(column, shape=column.shape[len(side) :])
        true = None if about is None else about["dtypes"].get(name)
        columns[name] = column if true is None else _as(path, name, column, true)
    return columns, about


def _source(path: Path, reader: Reader, lanes: int | None, fields: Fields) -> Source:
    columns, about = columns_of(path, reader, lanes)
    if about is None:
        _guards.check_ring(_CALL, columns)
        steps = row_count(_CALL, {name: columns[name] for name in choose_leaves(_CALL, columns, fields)})
        return Source(columns, steps, lanes)
    mask = columns.pop(_export.MASK, None)
    return Source(columns, about["steps"], about["lanes"], None if mask is None else mask.read)


def _as(path: Path, name: str, column: Column, true: Any) -> Column:
    """Return a column whose integers are the bits of another dtype."""
    dtype = DTYPES.get(true) if isinstance(true, str) else None
    if dtype is None or dtype.itemsize != column.dtype.itemsize:
        what, size = str(true)[:80], column.dtype.itemsize
        raise ValueError(f"{path}: dtype of '{name}' is {what!r}; expected one of {size} bytes.")
    return dataclasses.replace(column, dtype=dtype, read=lambda first, last: column.read(first, last).view(dtype))


def _about(path: Path, reader: Reader) -> dict[str, Any] | None:
    """Return the checked description of a file; None if another program wrote it."""
    text = reader.about()
    if text is None:
        return None
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{path}: '__fbuf__' does not describe rows. The file is damaged.")
    if about.get("version") != VERSION:
        version = str(about.get("version"))[:80]
        raise ValueError(f"{path}: has version {version!r}; expected {VERSION}. Use a later fbuf.")
    columns, dtypes = about.get("columns"), about.get("dtypes")
    if not isinstance(columns, list) or not isinstance(dtypes, dict) or {type(name) for name in columns} - {str}:
        raise ValueError(f"{path}: '__fbuf__' lists no columns. The file is damaged.")
    about["steps"] = check_count(str(path), "steps", about.get("steps"))
    lanes = about.get("lanes")
    about["lanes"] = None if lanes is None else check_count(str(path), "lanes", lanes)
    return about


def from_arrays(
    arrays: Any,
    *,
    buffer: Buffer | None = None,
    capacity: int | None = None,
    lanes: int | None = None,
    priority: Any = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    newest: int | None = None,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Fill a buffer with rows from arrays, oldest first.

    Args:
      arrays: A dict (or any pytree) of arrays `[N, ...]`, with lanes `[N, E, ...]`: of numpy or JAX, or anything that
        slices like
        them and has `shape` and `dtype`. It is read block by block, so a `numpy.memmap` may be larger than memory.
      buffer: The buffer to fill; None: one with room for exactly these rows, `Uniform`, or `Prioritized` with `priority`.
      capacity: Of the buffer made if none is passed; None: the number of rows.
      lanes: E, if arrays are `[N, E, ...]`; None: `buffer.lanes`.
      priority: |p| of each row, float `[N]`, with lanes `[N, E]`; None: that of new rows.
      fields: The leaves to take: `{name there: name here}`, or names; "ted": torchrl's layout, each observation once;
        None: all, in their structure.
      dtypes: `{name here: dtype}`, the casts to make. Otherwise only 64-bit integers are cast, to 32 bits, if they fit and
        jax_enable_x64 is off.
      newest: Take only this number of rows (per lane), the last ones.
      progress: True: a bar; or a function of `(done, total)`, in rows (per lane).
    Returns:
      The buffer, and its state.
    Raises:
      ValueError: leaves of different lengths; text or objects; more rows than capacity; other lanes; a value that a dtype
        cannot hold.
      TypeError: 64-bit floats while jax_enable_x64 is off and without a cast; a dtype that no buffer holds.
    Cost: O(N), in blocks of about 8 MiB.

    Example:
      >>> import fbuf, numpy as np
      >>> buffer, state = fbuf.interop.from_arrays({"obs": np.zeros((5, 3), np.float32), "action": np.arange(5)})
      >>> buffer.capacity, buffer.last(state, 2).data["action"].tolist()
      (5, [3, 4])
    """
    call = "from_arrays"
    if buffer is not None and lanes is None:
        lanes = buffer.lanes
    columns = {name: column_of(name, leaf, lanes) for name, leaf in named_leaves(arrays).items()}
    _guards.check_ring(call, columns)
    steps = row_count(call, {name: columns[name] for name in choose_leaves(call, columns, fields)})
    magnitude = None if priority is None else np.abs(np.asarray(priority, np.float32))
    shape = (steps,) if lanes is None else (steps, lanes)
    if magnitude is not None and (magnitude.shape != shape or not np.isfinite(magnitude).all()):
        what = f"has shape {list(magnitude.shape)}" if magnitude.shape != shape else "is not finite"
        raise ValueError(f"{call}: priority {what}; expected finite numbers of shape {list(shape)}.")
    source = Source(columns, steps, lanes, priority=magnitude, structure=jax.tree.structure(arrays))
    return fill(call, source, buffer, capacity=capacity, fields=fields, dtypes=dtypes, newest=newest, progress=progress)
