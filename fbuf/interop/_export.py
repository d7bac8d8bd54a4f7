"""Write the rows of a buffer to one `.npz` or `.h5`: leaves `[T, ...]`, oldest first."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Bar, Progress
from fbuf.interop import _atomic_file
from fbuf.interop._row_reader import Reader

FORMAT, VERSION = "fbuf rows", 1


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
      path: The file.
      rows: Number of rows, over all lanes.
      episodes: Number of episodes, partial ones included; None if not counted.
      dropped: Rows left out because the layout cannot hold them.
      nbytes: Size of the file.
    """

    path: Path
    rows: int
    episodes: int | None
    dropped: int
    nbytes: int


def to_file(
    path: str | os.PathLike[str],
    buffer: Buffer,
    state: BufferState,
    *,
    names: Mapping[str, str | None] | None = None,
    episode: str | None = None,
    compress: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> Exported:
    """Write all rows, oldest first, to one `.npz` or `.h5`, which `from_file` reads.

    Leaves are arrays `[T, ...]`, with lanes `[T, E, ...]`, under their names (`"next/obs"`; groups in HDF5). If lanes hold
    different numbers of rows, `__mask__` bool `[T, E]` marks those that exist. Priorities, counters, cuts and the
    buffer's configuration are not in the file: use `fbuf.save`.

    Args:
      path: Ends in .npz, .h5 or .hdf5 (`pip install "fbuf[h5]"`). The file is written atomically.
      buffer, state: A buffer and its state, which is not changed.
      names: `{leaf or subtree: name in the file}`; None as a name leaves it out.
      episode: Name of an additional column, int64: the number of each row's episode, which a cut ends too. Numbers grow along
        a lane, and no two lanes share one.
      compress: Deflate (npz) or gzip with checksums (h5): smaller, and much slower.
      overwrite: Whether to replace an existing file.
      progress: True: a bar; or a function of `(done, total)`, in leaves.
    Returns:
      What was written.
    Raises:
      FileExistsError: the file exists, and overwrite is False.
      ImportError: h5py is missing.
      RuntimeError: rows of this state have expired on the host.
      TypeError: the storage is `Ragged`; the state is traced.
      ValueError: another ending; names that no leaf has or that clash.
    Cost: O(C) reads, one leaf after another in blocks of about 8 MiB; memory for a few of these.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     done = fbuf.interop.to_file(f"{folder}/rows.npz", buffer, state, names={"t": "time"})
      ...     buffer, state = fbuf.interop.from_file(done.path)
      >>> buffer.rows(state).data["time"].tolist()
      [0, 1, 2, 3, 4]
    """
    call = "to_file"
    reader = Reader(call, buffer, state)
    columns = _atomic_file.rename_leaves(call, reader.spec, names)
    _atomic_file.check_names(call, [*columns.values(), *([episode] if episode else [])])
    if episode and not ((buffer.ends or buffer.view.rule.episode) and buffer.geometry.streams):
        raise ValueError(f"{call}: episode is '{episode}', but rows have no ends. Use Buffer(episode_end=).")
    lanes = () if reader.lanes is None else (reader.lanes,)
    steps, number = reader.steps, int(reader.sizes.sum())
    episodes = None
    bar, path = Bar(progress, call, len(columns), " leaves"), Path(path)
    with contextlib.closing(bar), _atomic_file.open_sink(call, path, compress, overwrite) as sink:
        for leaf, name in columns.items():
            spec = reader.spec[leaf]
            shape = (steps, *lanes, *spec.shape)
            sink.column(name, shape, np.dtype(spec.dtype), reader.steps_of(leaf))
            bar(1)
        if episode:
            ids, episodes = _episodes(reader, buffer.ends)
            sink.column(episode, (steps, *lanes), np.dtype(np.int64), [ids.reshape(steps, *lanes)])
        if number != steps * len(reader.sizes):
            sink.column(
                _atomic_file.MASK, (steps, *lanes), np.dtype(bool), [reader.mask(0, steps).reshape(steps, *lanes)]
            )
        sink.finish({"format": FORMAT, "version": VERSION, "layout": "rows", "lanes": reader.lanes, "steps": steps})
    return Exported(path, number, episodes, 0, path.stat().st_size)


def _episodes(reader: Reader, ends: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Return the episode of each row, int64[T, E], and the number of episodes."""
    end = reader.cuts()
    for name in ends:
        end |= reader.flag(name)
    there = reader.mask(0, reader.steps)
    before = np.cumsum(end, axis=0, dtype=np.int64) - end
    ids = before * len(reader.sizes) + np.arange(len(reader.sizes))
    return np.where(there, ids, -1), len(np.unique(ids[there]))
