"""Write the rows of a buffer to one `.npz` or `.h5`: leaves `[T, ...]`, oldest first."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Bar, Progress
from fbuf._core.pytree import under
from fbuf._rows.columns import check_name
from fbuf._rows.row_reader import Exported, Reader
from fbuf.interop import _hdf5, _npz

H5 = (".h5", ".hdf5")
MASK = "__mask__"  # which rows there are, where lanes hold different numbers
RESERVED = (_npz.ABOUT, MASK)


class Sink:
    """Write columns; the description and the dtypes that the format lacks follow at the end."""

    def __init__(self, writer: _npz.Writer | _hdf5.Writer) -> None:
        self._writer = writer
        self.dtypes: dict[str, str] = {}
        self.names: list[str] = []

    def column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> None:
        """Write one leaf of all rows from blocks; dtypes beyond numpy's own (bfloat16, float8) as integers."""
        self.names.append(name)
        if dtype.isbuiltin == 2:
            self.dtypes[name] = dtype.name
            dtype = np.dtype(f"u{dtype.itemsize}")
            blocks = (np.ascontiguousarray(block).view(dtype) for block in blocks)
        self._writer.column(name, shape, dtype, blocks)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the description."""
        self._writer.close(json.dumps({**about, "columns": self.names, "dtypes": self.dtypes}, sort_keys=True).encode())


@contextlib.contextmanager
def open_sink(call: str, path: Path, compress: bool, overwrite: bool) -> Iterator[Sink]:
    """Yield a `Sink` whose file replaces `path` after the block; an exception leaves everything unchanged.

    Raises:
      ValueError: the name does not end in .npz, .h5 or .hdf5.
      FileExistsError: the file exists, and `overwrite` is False.
      OSError: the file cannot be written.
    """
    if path.suffix not in (".npz", *H5):
        raise ValueError(f"{call}: {path} ends in {path.suffix!r}; expected .npz, .h5 or .hdf5.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{call}: {path} exists. Pass overwrite=True, or choose another name.")
    if path.suffix in H5:
        _hdf5.library(call)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    writer: _npz.Writer | _hdf5.Writer = (_hdf5.Writer if path.suffix in H5 else _npz.Writer)(part, compress)
    try:
        yield Sink(writer)
        _sync(part)
        if overwrite:
            os.replace(part, path)
        else:
            _place_new(call, part, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(Exception):
            writer.file.close()
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _place_new(call: str, part: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError if another file has got that name in the meantime, which stays."""
    try:
        os.link(part, path)
    except OSError:  # also where a file system has no links
        if os.path.lexists(path):
            raise FileExistsError(f"{call}: {path} exists. Pass overwrite=True, or choose another name.") from None
        os.replace(part, path)
    else:
        part.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_leaves(call: str, leaves: Iterable[str], names: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return `{leaf: name in the file}`; a subtree may be renamed or left out (None).

    Raises:
      ValueError: no leaf has the name, or the new name is invalid.
    """
    leaves, names = list(leaves), dict(names or {})
    out: dict[str, str | None] = {leaf: leaf for leaf in leaves}
    for name, to in sorted(names.items(), key=lambda item: len(item[0])):  # the longest name counts
        if not (found := under(name, leaves)):
            raise ValueError(f"{call}: names has '{name}', but rows have {', '.join(leaves)}.")
        out |= {leaf: None if to is None else check_name(call, to + leaf[len(name) :]) for leaf in found}
    return {leaf: to for leaf, to in out.items() if to is not None}


def check_names(call: str, names: Iterable[str]) -> None:
    """Raise ValueError if two columns would have one name, or one would be a folder of another."""
    seen: set[str] = set()
    for name in names:
        if name in seen or name in RESERVED:
            what = "is reserved" if name in RESERVED else "would be two columns"
            raise ValueError(f"{call}: '{name}' {what}. Rename a leaf: names={{'{name}': ...}}.")
        seen.add(name)
    for name in seen:
        if len(under(name, seen)) > 1:
            raise ValueError(f"{call}: '{name}' would be a column and a group. Rename it: names={{'{name}': ...}}.")


FORMAT, VERSION = "fbuf rows", 1


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
      ...     buffer, state = fbuf.interop.from_file(done.path).into()
      >>> buffer.rows(state).data["time"].tolist()
      [0, 1, 2, 3, 4]
    """
    call = "to_file"
    reader = Reader(call, buffer, state)
    columns = rename_leaves(call, reader.spec, names)
    check_names(call, [*columns.values(), *([episode] if episode else [])])
    if episode and not ((buffer.ends or buffer.view.rule.episode) and buffer.geometry.streams):
        raise ValueError(f"{call}: episode is '{episode}', but rows have no ends. Use Buffer(episode_end=).")
    lanes = () if reader.lanes is None else (reader.lanes,)
    steps, number = reader.steps, int(reader.sizes.sum())
    episodes = None
    bar, path = Bar(progress, call, len(columns), " leaves"), Path(path)
    with contextlib.closing(bar), open_sink(call, path, compress, overwrite) as sink:
        for leaf, name in columns.items():
            spec = reader.spec[leaf]
            shape = (steps, *lanes, *spec.shape)
            sink.column(name, shape, np.dtype(spec.dtype), reader.steps_of(leaf))
            bar(1)
        if episode:
            ids, episodes = _episodes(reader, buffer.ends)
            sink.column(episode, (steps, *lanes), np.dtype(np.int64), [ids.reshape(steps, *lanes)])
        if number != steps * len(reader.sizes):
            sink.column(MASK, (steps, *lanes), np.dtype(bool), [reader.mask(0, steps).reshape(steps, *lanes)])
        sink.finish({"format": FORMAT, "version": VERSION, "layout": "rows", "lanes": reader.lanes, "steps": steps})
    return Exported(path, number, episodes, 0, path.stat().st_size)


def _episodes(reader: Reader, ends: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Return the episode of each row, int64[T, E], and the number of episodes."""
    end = reader.cuts()
    for name in ends:
        end |= reader.flag(name)
    exists = reader.mask(0, reader.steps)
    before = np.cumsum(end, axis=0, dtype=np.int64) - end
    ids = before * len(reader.sizes) + np.arange(len(reader.sizes))
    return np.where(exists, ids, -1), len(np.unique(ids[exists]))
