"""`preprocess`: map a function over the rows of a data set, or over windows of it, into a new data set.

One jitted program handles every batch, the last padded. Segments of the result are written one by one, so an interruption
loses at most one per worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._core.pytree import PyTree, tree_bytes
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import NAME
from fbuf._host.codecs.codec import Codec
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._arrays.episodes import default_view
from fbuf.datasets._arrays.segments import Work, check_free, check_workers, rows_per_segment, to_path, write
from fbuf.datasets._lock import exclusive
from fbuf.datasets._preprocess_source import Stored, Windows, origin_of
from fbuf.datasets._preprocess_trace import CALL, Program
from fbuf.interop._columns import BLOCK_BYTES, Block
from fbuf.views import Row

_ENDS = ("terminated", "truncated")
_MOST_BATCH, _MOST_WINDOWS = 4096, 256


def preprocess(
    data: str | os.PathLike[str] | dataset.DataSet | tuple[Buffer, BufferState],
    fn: Callable[[PyTree], PyTree],
    *,
    dest: str | os.PathLike[str],
    view: View | None = None,
    keep: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    piece_rows: int | None = None,
    codec: Mapping[str, Codec] | None = None,
    sampler: Sampler | None = None,
    metadata: Mapping[str, Any] | None = None,
    resume: bool = True,
    workers: int = 0,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Write a function's result for each row to a new data set, and open it.

    Args:
      data: A data set's path, or a buffer and its state (of any storage, without lanes).
      fn: A pure function of one row, a dict of arrays without leading axes, to a dict of arrays; it is vmapped and jitted.
      dest: The folder to write, which must not exist.
      view: None: `fn` gets rows, in order, and the result has the same order. A view: `fn` gets the view's result for each
        anchor that can be sampled, in order, each once; the results are rows of no episode.
      keep: Leaves of the row to keep if `fn` does not return them; None: `terminated` and `truncated` if rows have them,
        so that
        episodes are preserved; nothing with a view, or for a buffer whose writer keeps no order (`TopK`, `Reservoir`).
      limit: Process only the first rows or windows: to try a function.
      batch_size: Rows in one call of the compiled program; None: 8 MiB of rows, at most 4096; with a view 256.
      piece_rows, codec, metadata, progress: As for `from_arrays`.
      sampler: Of the buffer; its view is `Transition` if the rows are steps, else `Row`.
      resume: Continue an interrupted call with the same function and data. Functions that call back into Python
        (`jax.pure_callback`) and live buffers cannot resume, since nothing identifies them. False: discard its segments.
      workers: Segments written at a time, in threads; 0: one.
    Returns:
      The new buffer and its state, as from `fbuf.datasets.open(dest)`.
    Raises:
      FileExistsError: `dest` exists and is not of an interrupted call with this function.
      ValueError: `dest` is the source, or within it; `fn` is not pure; there are no rows.
      TypeError: `fn` does not return a dict of arrays.
      StoreCorrupted: a row of the source is damaged.
    Cost: reads and writes each row once; at most two compilations.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp, numpy as np
      >>> data = {
      ...     "observations": {"place": np.ones((6, 3), np.float32), "goal": np.zeros((6, 2), np.float32)},
      ...     "actions": np.zeros((6, 1), np.float32),
      ...     "rewards": np.ones(6, np.float32),
      ...     "terminals": np.array([0, 0, 1, 0, 0, 1], bool),
      ... }
      >>> def flat(row):
      ...     obs = jnp.concatenate([row["obs"]["place"], row["obs"]["goal"]])
      ...     return {"obs": obs, "action": row["action"], "reward": row["reward"]}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     buffer, state = fbuf.datasets.from_arrays(data, path=f"{folder}/maze")
      ...     buffer, state = fbuf.datasets.preprocess((buffer, state), flat, dest=f"{folder}/flat")
      ...     rows = buffer.rows(state).data
      ...     print(sorted(rows), rows["obs"].shape)
      ...     del state
      ['action', 'obs', 'reward', 'terminated', 'truncated'] (6, 5)
    """
    check_workers(CALL, workers)
    _check_count("limit", limit)
    _check_count("batch_size", batch_size)
    path = to_path(CALL, "dest", dest)
    _open.check(path, None, sampler)
    origin = origin_of(data, view)
    try:
        if origin.path is not None:
            _check_apart(origin.path, path)
        if not resume:
            _discard_segments(path)
        check_free(CALL, path, unfinished=True)
        rows = origin.rows if limit is None else min(int(limit), origin.rows)
        if not rows:
            why = "" if view is None else f"; {view!r} finds no window to draw"
            raise ValueError(f"{CALL}: there is nothing to write; expected at least one row{why}.")
        program = Program(fn, origin.row, _kept(keep, origin), codec)
        schema = program.schema
        _open.check(path, None if origin.steps else Row(), sampler, schema)
        if batch_size is None:
            most = _MOST_BATCH if view is None else _MOST_WINDOWS
            batch_size = max(1, min(most, BLOCK_BYTES // max(1, schema.row_bytes, tree_bytes(origin.row))))
        batch = min(int(batch_size), rows)
        size = rows_per_segment(CALL, piece_rows, schema)
        starts = range(0, rows, size)
        run = origin.runner(program, batch)

        def blocks(number: int) -> Iterator[Block]:
            stop = min(starts[number] + size, rows)
            for start in range(starts[number], stop, batch):
                yield run(start, min(start + batch, stop))

        mark = f"{program.mark} {origin.mark}" + ("" if view is None else f" {batch}")
        about = {**dict(metadata or {}), "from": "preprocess"}
        sizes = [min(start + size, rows) - start for start in starts]
        work = Work(schema, sizes, blocks, lambda number: f"{mark} {starts[number]}", lambda: about)
        write(CALL, path, work, workers=workers, progress=progress)
    finally:
        origin.close()
    steps = default_view(schema.names, rows)
    return _open.open(path, view=steps if origin.steps else Row(), sampler=sampler)


def _kept(keep: Sequence[str] | None, origin: Stored | Windows) -> tuple[str, ...]:
    if isinstance(keep, str):
        raise TypeError(f"{CALL}: keep is {keep!r}; expected a tuple. Write keep=({keep!r},).")
    if keep is None:
        return tuple(name for name in _ENDS if name in origin.names and origin.steps)
    if missing := [name for name in keep if name not in origin.names]:
        raise ValueError(f"{CALL}: keep has '{missing[0]}', but rows have {', '.join(origin.names) or 'none'}.")
    return tuple(keep)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1):
        raise ValueError(f"{CALL}: {name} is {value!r}; expected an int >= 1, or None.")


def _check_apart(source: Path, dest: Path) -> None:
    a, b = source.resolve(), dest.resolve()
    if a == b:
        raise ValueError(f"{CALL}: dest is {dest}, the source itself; expected another folder.")
    if a in b.parents or b in a.parents:
        raise ValueError(f"{CALL}: dest is {dest}, and the source {source}; expected neither within the other.")


def _discard_segments(path: Path) -> None:
    if path.is_dir() and not (path / NAME).exists():
        with exclusive(CALL, path):
            for number in dataset.committed(path):
                dataset.discard(path, number)
