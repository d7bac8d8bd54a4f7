"""`from_arrays`: write flat arrays, in the layout of D4RL and others, to a data set.

Data that slices (arrays, `numpy.memmap`, HDF5) is checked from end to end first, then written in segments in parallel, and
resumed after an interruption. Streams (iterators, `.npz`) are checked on the way, and a failure leaves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._formats.dataset.manifest import load
from fbuf._host.codecs.codec import Codec
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._arrays.episodes import KNOWN, default_view
from fbuf.datasets._arrays.rows import CALL, Settings, columns_of, write_columns, write_tables
from fbuf.datasets._arrays.segments import check_free, check_workers, to_path
from fbuf.interop import _load
from fbuf.interop._columns import blocks, choose_leaves, row_count, rows_per_block


def from_arrays(
    data: Any,
    *,
    path: str | os.PathLike[str],
    fields: Mapping[str, str] | Sequence[str] | None = None,
    episode_end: Sequence[str] | None = None,
    dtypes: Mapping[str, str] | None = None,
    codec: Mapping[str, Codec] | None = None,
    piece_rows: int | None = None,
    view: View | None = None,
    sampler: Sampler | None = None,
    metadata: Mapping[str, Any] | None = None,
    workers: int = 0,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Write a data set from flat arrays, and open it.

    `observations`, `actions`, `rewards`, `terminals`, `timeouts` (and their usual synonyms) become `obs`, `action`, `reward`,
    `terminated`, `truncated`; other leaves keep their names. `terminated` and `truncated` always exist, as bool.
    `next_observations` are compared with the observations of the next rows, and stored as `final_obs` where an
    episode ends; if they differ without an end, rows are missing, and the row is marked truncated. The last row is truncated
    unless it terminated.

    Args:
      data: A (nested) dict of arrays `[N, ...]`, or of anything that slices like them and has `shape` and `dtype`
        (`numpy.memmap`, an h5py group or data set); an iterable of such dicts, in order of time, each of any length, which
        is read
        once; or the path of an `.npz`, `.h5` or `.hdf5`.
      path: The folder to write, which must not exist. An interrupted call with the same arguments is completed (not with an
        iterable or an `.npz`, which leave nothing).
      fields: The leaves to take: `{name there: name here}`, or names; None: all.
      episode_end: Further boolean leaves (names here) that end an episode, as truncations unless `terminated`. (): rows
        are steps
        of no episode, unless a leaf says otherwise.
      dtypes: `{name here: dtype}`, the casts to make. Otherwise only 64-bit integers are cast, to 32 bits, if they fit and
        jax_enable_x64 is off.
      codec: `{name here: codec}`, `storages.Zstd(...)`, `BitPack()` or `Raw()`; default `Zstd()` for leaves of 1 KiB per
        row or
        more, and for `final_obs`.
      piece_rows: Rows of a segment; None: 512 MiB before compression, at most a million. A segment is written atomically,
        and is
        in memory, compressed, until then.
      view, sampler: Of the buffer; None: `Transition` if rows are steps, and `Uniform`.
      metadata: Further JSON to store; `fbuf.datasets.info` shows it.
      workers: Segments written at a time, in threads, if rows can be read in any order; 0: one.
      progress: True: a bar; or a function of `(rows done, total)`, the total 0 for an iterable.
    Returns:
      The buffer and its state, as from `fbuf.datasets.open(path)`.
    Raises:
      FileExistsError: `path` exists.
      ValueError: leaves of different lengths; two of one name; no leaf says where episodes end; a reward that is not
        finite; a
        flag that is neither 0 nor 1; text, objects; an iterable whose dicts differ; no rows.
      TypeError: 64-bit floats while jax_enable_x64 is off and without a cast.
    Cost: O(N), in blocks of about 8 MiB; flags and rewards are read twice.

    Example:
      >>> import fbuf, tempfile, numpy as np
      >>> data = {
      ...     "observations": np.arange(12, dtype=np.float32).reshape(6, 2),
      ...     "actions": np.zeros((6, 1), np.float32),
      ...     "rewards": np.ones(6, np.float32),
      ...     "terminals": np.array([0, 0, 1, 0, 0, 0], bool),
      ...     "timeouts": np.array([0, 0, 0, 0, 0, 1], bool),
      ... }
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     buffer, state = fbuf.datasets.from_arrays(data, path=f"{folder}/hopper")
      ...     rows = buffer.rows(state).data
      ...     print(buffer.capacity, rows["obs"][1], rows["terminated"])
      ...     del state
      6 [2. 3.] [False False  True False False False]
    """
    path = to_path(CALL, "path", path)
    check_workers(CALL, workers)
    _open.check(path, view, sampler)
    for name, value in {"fields": fields, "episode_end": episode_end}.items():
        if isinstance(value, str):
            raise TypeError(f"{CALL}: {name} is {value!r}; expected names. Write {name}=({value!r},).")
    ends = None if episode_end is None else tuple(episode_end)
    check = functools.partial(_open.check, path, view, sampler)
    try:
        about = json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{CALL}: metadata is not JSON ({error}); expected text, numbers and lists.") from None
    settings = Settings(fields, ends, dtypes, codec, piece_rows, check, about, workers, progress)
    if isinstance(data, (str, os.PathLike)):
        _from_file(Path(data).expanduser(), path, settings)
    elif isinstance(data, Mapping):
        check_free(CALL, path, unfinished=True)
        write_columns(columns_of(CALL, data), path, settings)
    elif isinstance(data, Iterable) and not hasattr(data, "dtype"):
        check_free(CALL, path, unfinished=False)
        write_tables(data, path, settings)
    else:
        kind = type(data).__name__
        raise TypeError(f"{CALL}: data is a {kind}; expected a dict of arrays, an iterable of them, or a path.")
    return opened(path, view, sampler)


def opened(path: Path, view: View | None, sampler: Sampler | None) -> tuple[Buffer, BufferState]:
    """Open a data set, by default through the view for its leaves."""
    about = load(path)
    view = default_view(about.schema.names, about.rows) if view is None else view
    return _open.open(path, view=view, sampler=sampler)


def _from_file(file: Path, path: Path, settings: Settings) -> None:
    with _load.opened(CALL, file) as reader:
        check_free(CALL, path, unfinished=file.suffix != ".npz")
        columns, said = _load.columns_of(file, reader)
        if said is not None and said["lanes"] is not None:
            raise ValueError(f"{CALL}: {file} has rows of {said['lanes']} lanes; expected one stream, [N, ...].")
        if file.suffix != ".npz":
            return write_columns(columns, path, settings)
        # Members of a zip are read from front to back only.
        names = choose_leaves(CALL, columns, settings.fields, KNOWN)
        columns = {name: columns[name] for name in names}
        rows, size = row_count(CALL, columns), rows_per_block(columns.values())
        tables = blocks(CALL, columns, 0, rows, size)
        write_tables(tables, path, dataclasses.replace(settings, fields=names))
