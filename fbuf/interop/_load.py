"""Read rows from arrays in memory, anything that slices like them, streams of dicts, or one `.npz` or `.h5` file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from fbuf._core.pytree import named_leaves
from fbuf._rows.columns import DTYPES, Column, Fields, check_count, choose_leaves, column_of, columns_of, row_count
from fbuf.datasets._arrays import episodes
from fbuf.interop import _export, _formats, _guards, _hdf5, _npz
from fbuf.interop._export import FORMAT, VERSION
from fbuf.interop._source import Source

Reader = _npz.Reader | _hdf5.Reader
Ends = Literal["terminated", "trajectory"] | None


def from_arrays(
    data: Any,
    *,
    lanes: int | None = None,
    priority: Any = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    ends: Ends = None,
    episode_end: Sequence[str] | None = None,
    rows: int | None = None,
) -> Source:
    """Return rows from arrays, oldest first.

    `observations`, `actions`, `rewards`, `terminals`, `timeouts` (and their usual synonyms) become `obs`, `action`, `reward`,
    `terminated`, `truncated`; other leaves keep their names. If a leaf says where episodes end, rows are steps: `terminated`
    and `truncated` exist, as bool. `next_observations` are compared with the observations of the next rows, and stored as
    `final_obs` where an episode ends; if they differ without an end, rows are missing, and the row is marked truncated. The
    last row (of each lane) is truncated unless it terminated. Other rows are taken as they are.

    Args:
      data: A dict (or any pytree) of arrays `[N, ...]`, with lanes `[N, E, ...]`: of numpy or JAX, or anything that slices like
        them and has `shape` and `dtype` (`numpy.memmap`, an h5py group or data set). They are read block by block, so they
        may be larger than memory. Or an iterable of dicts, in order of time, each of any length, which is read once.
      lanes: E, if arrays are `[N, E, ...]`.
      priority: |p| of each row, float `[N]`, with lanes `[N, E]`; None: that of new rows. A data set stores none.
      fields: The leaves to take: `{name there: name here}`, or names; "ted": `interop.TED`, each observation once; None: all.
      dtypes: `{name here: dtype}`, the casts to make. Otherwise only 64-bit integers are cast, to 32 bits, if they fit and
        jax_enable_x64 is off.
      ends: What `terminals` mean where no leaf has the time limits. "terminated": terminations, after which the discount is 0.
        "trajectory": ends of trajectories, as OGBench's, after which agents bootstrap.
      episode_end: Further boolean leaves (names here) that end an episode, as truncations unless `terminated`. (): rows are
        steps of no episode, unless a leaf says otherwise.
      rows: Take the first rows only; all of them: rows of zeros at the end are steps. None: such rows are an error.
    Returns:
      The source: `into` a buffer, or `save` it as a data set.
    Raises:
      ValueError: leaves of different lengths; two of one name; text or objects; no leaf says where episodes with rewards end;
        `terminals` without a declaration; leaves of a ring.
      TypeError: data is neither a pytree of arrays nor an iterable of dicts.

    Example:
      >>> import fbuf, numpy as np
      >>> source = fbuf.interop.from_arrays({"obs": np.zeros((5, 3), np.float32), "action": np.arange(5)})
      >>> buffer, state = source.into()
      >>> buffer.capacity, buffer.rows(state, last=2).data["action"].tolist()
      (5, [3, 4])
    """
    call = "from_arrays"
    source = Source("arrays", {}, -1, lanes, call=call, fields=fields, dtypes=dtypes, rows=rows, slots=True)
    if not isinstance(data, Mapping) and _gives_dicts(data):
        if rows is not None:
            raise ValueError(f"{call}: rows is {rows}, but data is an iterable. Yield only the rows to take.")
        if priority is not None or lanes is not None:
            name = "lanes" if priority is None else "priority"
            raise ValueError(f"{call}: {name} is given, but data is an iterable. Pass arrays.")
        checked = (_checked_names(call, item, fields, ends) for item in data)
        return dataclasses.replace(
            _as_steps(source, None, ends, episode_end), format="tables", tables=checked, lanes=None
        )
    if isinstance(data, Mapping):
        columns = columns_of(call, data, lanes)
        if not isinstance(data, dict):  # a group of HDF5
            columns = dict(_formats.without_infos(columns, fields))
    elif isinstance(data, (int, float, str, bytes)) or data is None:
        raise TypeError(f"{call}: data is a {type(data).__name__}; expected a dict of arrays, or an iterable of them.")
    else:
        columns = {name: column_of(name, leaf, lanes) for name, leaf in named_leaves(data).items()}
    source = dataclasses.replace(source, columns=columns)
    _guards.check_ring(call, columns, fields)
    source = _as_steps(source, columns, ends, episode_end)
    names = choose_leaves(call, columns, fields, source.known)
    steps = row_count(call, {name: columns[name] for name in names})
    magnitude = None if priority is None else np.abs(np.asarray(priority, np.float32))
    shape = (steps,) if lanes is None else (steps, lanes)
    if magnitude is not None and (magnitude.shape != shape or not np.isfinite(magnitude).all()):
        what = f"has shape {list(magnitude.shape)}" if magnitude.shape != shape else "is not finite"
        raise ValueError(f"{call}: priority {what}; expected finite numbers of shape {list(shape)}.")
    kept = source.plain and fields is None and list(names) == list(names.values())
    structure = jax.tree.structure(data) if kept and list(named_leaves(data)) == list(columns) else None
    return dataclasses.replace(source, steps=steps, priority=magnitude, structure=structure)


def _gives_dicts(data: Any) -> bool:
    """Whether data is an iterable of dicts, and no pytree of arrays."""
    if isinstance(data, (list, tuple)):
        return not hasattr(data, "_fields") and all(isinstance(item, Mapping) for item in data)
    return isinstance(data, Iterable) and not hasattr(data, "dtype") and not isinstance(data, str | bytes)


def _checked_names(call: str, item: Any, fields: Fields, ends: Ends) -> Any:
    if isinstance(item, Mapping):
        _guards.check_ring(call, item, fields)
        _guards.check_terminals(call, item, fields, ends)
    return item


def _as_steps(
    source: Source, columns: Mapping[str, Column] | None, ends: Ends, episode_end: Sequence[str] | None
) -> Source:
    """Return the source with known names; its rows are steps if a leaf, or the caller, says where episodes end."""
    call, fields = source.call, source.fields
    for name, value in {"fields": None if fields == "ted" else fields, "episode_end": episode_end}.items():
        if isinstance(value, str):
            raise TypeError(f"{call}: {name} is {value!r}; expected a dict or names. Write {name}=({value!r},).")
    known = episodes.KNOWN | (dict.fromkeys(_guards.TERMINALS, "truncated") if ends == "trajectory" else {})
    plain = False
    if columns is not None:
        _guards.check_terminals(call, columns, fields, ends)
        names = choose_leaves(call, columns, fields, known).values()
        flags = [name for name in names if name in ("terminated", "truncated") or name.split("/")[0] == episodes.NEXT]
        plain = episode_end is None and not flags and "reward" not in names
    extra = None if episode_end is None else tuple(episode_end)
    return dataclasses.replace(source, known=known, plain=plain, episode_end=extra)


def from_file(
    path: str | os.PathLike[str],
    *,
    lanes: int | None = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    ends: Ends = None,
    episode_end: Sequence[str] | None = None,
    rows: int | None = None,
    mask: str | None = None,
) -> Source:
    """Return the rows of one `.npz`, `.h5` or folder, oldest first, by its contents.

    Read are files of `to_file` and `to_ted`, as they are; of tianshou (`save_hdf5`), d3rlpy, robomimic, LeRobot v3 and D4RL;
    and any arrays `[N, ...]`, with lanes `[N, E, ...]`, of little-endian numbers in C order, as by `from_arrays`. Nothing is
    unpickled. Values of 64 bits of tianshou, d3rlpy, robomimic and LeRobot become 32 bits while jax_enable_x64 is off.

    Args:
      path: The file, or the folder of LeRobot.
      lanes: E, for another program's arrays `[N, E, ...]`.
      fields: `{name there: name here}`, or names; "ted": `interop.TED`, each observation once and scalars without their last
        axis; None: all (of D4RL all but `infos/` and `metadata/`).
      dtypes, episode_end, rows: As for `from_arrays`.
      ends: As for `from_arrays`; what robomimic's `dones` and LeRobot's `next.done` mean, which their files do not say.
      mask: Of robomimic: take the demonstrations of this filter key, "train".
    Returns:
      The source: `into` a buffer, or `save` it as a data set.
    Raises:
      FileNotFoundError: the file is missing.
      ImportError: h5py or pyarrow is missing.
      ValueError: the file is damaged, truncated or inconsistent; it has pickles or links that `fields` does not leave out;
        it is of a format that is not read; else as `from_arrays`. The zip's checksums detect damage of an npz while its bytes
        are read.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(f"{folder}/data.npz", observations=np.ones((5, 3), np.float32), actions=np.arange(5))
      ...     buffer, state = fbuf.interop.from_file(f"{folder}/data.npz").into()
      >>> buffer.rows(state, last=2).data["action"].tolist()
      [3, 4]
    """
    call, path = "from_file", Path(path).expanduser()
    made = Source("arrays", {}, -1, lanes, call=f"{call}: {path}", fields=fields, dtypes=dtypes, rows=rows)
    options = {"ends": ends, "lanes": lanes, "episode_end": episode_end, "mask": mask}
    if path.is_dir():
        return _checked_use(_formats.from_folder(path, made, ends), options, "ends")
    _formats.refuse(call, path)
    reader = opened(call, path)
    try:
        found = _formats.recognise(path, reader, made, ends, mask)
        if found is not None:
            return _checked_use(found, options, *(("ends", "mask") if found.format.startswith("robomimic") else ()))
        found = _plain(path, reader, made, ends, episode_end)
        return _checked_use(found, options, "episode_end", *(() if found.format == _ROWS else ("ends", "lanes")))
    except BaseException:
        reader.close()  # which the error's traceback would keep open
        raise


def _checked_use(source: Source, options: Mapping[str, Any], *used: str) -> Source:
    """Return the source. Raises ValueError: an argument is given that it does not use."""
    for name, value in options.items():
        if value is not None and name not in used:
            raise ValueError(f"{source.call}: {name} is {value!r}, which the format '{source.format}' has no use for.")
    return source


_ROWS = "fbuf rows"


def _plain(path: Path, reader: Reader, made: Source, ends: Ends, episode_end: Sequence[str] | None) -> Source:
    """Return the rows of `to_file`, `to_ted`, D4RL or plain arrays."""
    columns, about = file_columns(path, reader, made.lanes)
    if about is not None:
        exists = columns.pop(_export.MASK, None)
        extra = None if episode_end is None else tuple(episode_end)
        settings = {"format": _ROWS, "lanes": about["lanes"], "mask": None if exists is None else exists.read}
        return dataclasses.replace(
            made, columns=columns, steps=about["steps"], **settings, plain=extra is None, episode_end=extra
        )
    _guards.check_ring(made.call, columns, made.fields)
    forward = path.suffix == ".npz"
    made = dataclasses.replace(made, columns=_formats.without_infos(columns, made.fields), forward=forward, slots=True)
    made = _as_steps(made, made.columns, ends, episode_end)
    names = choose_leaves(made.call, made.columns, made.fields, made.known)
    return dataclasses.replace(made, steps=row_count(made.call, {name: columns[name] for name in names}))


def opened(call: str, path: Path) -> Reader:
    """Open the arrays of a file, by its ending."""
    if path.suffix not in (".npz", *_export.H5):
        raise ValueError(f"{call}: {path} ends in {path.suffix!r}; expected .npz, .h5 or .hdf5.")
    return _npz.Reader(path) if path.suffix == ".npz" else _hdf5.Reader(path, call)


def file_columns(
    path: Path, reader: Reader, lanes: int | None = None
) -> tuple[dict[str, Column], dict[str, Any] | None]:
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
