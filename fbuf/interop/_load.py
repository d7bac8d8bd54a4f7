"""Rows from one `.npz` or `.h5`: what `to_file` or `to_ted` wrote, or anybody's arrays with time first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fbuf._buffer import Buffer
from fbuf._core.progress import Progress
from fbuf._state import BufferState
from fbuf.interop import _h5, _npz, _sink
from fbuf.interop._columns import Fields
from fbuf.interop._export import FORMAT, VERSION
from fbuf.interop._fill import fill
from fbuf.interop._source import DTYPES, Column, Source, check_count, refused

_CALL = "from_file"


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
    """A buffer with the rows of one `.npz` or `.h5`, oldest first.

    Args:
      path: What `to_file` or `to_ted` wrote; or arrays of anybody's, `[N, ...]`, with lanes `[N, E, ...]`, of numbers in
        little-endian order and row by row (in HDF5 all data sets of the file).
      buffer: The buffer to fill; None: one with room for just these rows.
      lanes: E, where the file is not ours and arrays are `[N, E, ...]`.
      fields: `{name there: name here}`, or names; "ted": `interop.TED`, each observation once and scalars without their last
        axis; None: all.
      dtypes, newest, progress: As for `from_arrays`.
    Returns:
      The buffer, and its state.
    Raises:
      FileNotFoundError: there is none.
      ImportError: h5py is missing.
      ValueError: the file is damaged, cut off, or claims what is not in it; holds pickles or links, unless `fields` leaves
        them out; else as `from_arrays`. Damage of an npz is noticed when its bytes pass, by the zip's checksums.
    Cost: O(N), in blocks of some 8 MiB.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(f"{folder}/data.npz", observations=np.ones((5, 3), np.float32), actions=np.arange(5))
      ...     names = {"observations": "obs", "actions": "action"}
      ...     buffer, state = fbuf.interop.from_file(f"{folder}/data.npz", fields=names)
      >>> buffer.last(state, 2).data["action"].tolist()
      [3, 4]
    """
    path = Path(path)
    if path.suffix not in (".npz", *_sink.H5):
        raise ValueError(f"{_CALL}: {path} ends in {path.suffix!r}; expected .npz, .h5 or .hdf5.")
    reader: _npz.Reader | _h5.Reader = _npz.Reader(path) if path.suffix == ".npz" else _h5.Reader(path, _CALL)
    try:
        source = _source(path, reader, lanes, buffer)
        return fill(_CALL, source, buffer, fields=fields, dtypes=dtypes, newest=newest, progress=progress)
    finally:
        reader.close()


def _source(path: Path, reader: Any, lanes: int | None, buffer: Buffer | None) -> Source:
    about = _about(path, reader)
    if about is not None:
        lanes = about["lanes"]
    elif lanes is None and buffer is not None:
        lanes = buffer.lanes
    there = (reader.arrays.keys() | reader.refused.keys()) - {"__fbuf__"}
    if about is not None and there != set(about["columns"]):
        other = sorted(there ^ set(about["columns"]))
        raise ValueError(f"{path}: '{other[0]}' is missing, or not one of its own. The file is damaged.")
    lead = 1 if lanes is None else 2
    columns: dict[str, Column] = {name: refused(why) for name, why in reader.refused.items()}
    steps: int | None = None if about is None else about["steps"]
    mask = None
    for name, (shape, dtype) in reader.arrays.items():
        if name == "__fbuf__":
            continue
        if len(shape) < lead or (lanes is not None and shape[1] != lanes) or (steps is not None and shape[0] != steps):
            axes = [steps if steps is not None else "N", *([] if lanes is None else [lanes]), "..."]
            raise ValueError(
                f"{path}: '{name}' has shape {list(shape)}; expected {axes}. All arrays are rows of one length; say lanes=E "
                f"for [N, E, ...]."
            )
        steps = shape[0]
        if name == "__mask__" and about is not None:
            mask = reader.read(name)
            continue
        true = None if about is None else about["dtypes"].get(name)
        column = Column(shape[lead:], dtype, reader.read(name))
        columns[name] = column if true is None else _as(path, name, column, true)
    order = {name: columns[name] for name in sorted(columns)}
    return Source(order, steps or 0, lanes, mask=mask)


def _as(path: Path, name: str, column: Column, true: Any) -> Column:
    """A column whose integers are the bits of another dtype."""
    dtype = DTYPES.get(true) if isinstance(true, str) else None
    if dtype is None or dtype.itemsize != column.dtype.itemsize:
        raise ValueError(
            f"{path}: says '{name}' is {str(true)[:80]!r}; expected a dtype of {column.dtype.itemsize} bytes."
        )
    return Column(column.shape, dtype, lambda first, last: column.read(first, last).view(dtype))


def _about(path: Path, reader: Any) -> dict[str, Any] | None:
    """What the file says about itself, checked; None where it is not ours."""
    text = reader.bytes_of("__fbuf__")
    if text is None:
        return None
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("dtypes"), dict):
        raise ValueError(
            f"{path}: '__fbuf__' does not describe rows; expected what to_file wrote. The file is damaged."
        )
    if about.get("version") != VERSION:
        raise ValueError(
            f"{path}: has version {str(about.get('version'))[:80]!r}; this fbuf reads {VERSION}. Use a later one."
        )
    columns = about.get("columns")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise ValueError(f"{path}: '__fbuf__' names no columns. The file is damaged.")
    about["steps"] = check_count(str(path), "steps", about.get("steps"))
    if about.get("lanes") is not None:
        about["lanes"] = check_count(str(path), "lanes", about["lanes"])
    return about
