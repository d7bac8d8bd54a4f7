"""`open`: the frozen buffer of a data set on disk, and its state; and what describes, verifies and deletes a data set."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fbuf._bridge import lifetime
from fbuf._buffer import init
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core import row_schema
from fbuf._core.arguments import check_choice
from fbuf._core.pytree import PyTree, named_leaves, nested
from fbuf._core.text_table import Section, counted, html, printable
from fbuf._formats import dataset
from fbuf._host.types import StoreCorrupted
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets._arrays.episodes import default_view
from fbuf.datasets._atari.workers import DOWNLOADS
from fbuf.datasets._lock import exclusive
from fbuf.samplers import Uniform
from fbuf.storages import DataSet
from fbuf.torch._dtypes import NARROW
from fbuf.views import Row, Transition
from fbuf.writers import Frozen

_MANY = 1 << 30  # rows of a data set that does not exist yet


def open(
    path: str | os.PathLike[str],
    *,
    view: View | None = None,
    sampler: Sampler | None = None,
    verify: Literal["full", "lazy"] = "lazy",
    prefetch: int = 0,
    batch_size: int | None = None,
    episode_end: tuple[str, ...] = (),
    on_read: Any = None,
    memory: int = 1 << 28,
    cache: int = 0,
) -> tuple[Buffer, BufferState]:
    """Open a data set as a read-only buffer for every reading method, view and sampler, inside jit.

    Args:
      path: Its folder, which must not move while the state is used.
      view: The view; None: `views.Row()`. Change it later by `buffer.convert(other, state)`.
      sampler: The sampler; None: `samplers.Uniform()`.
      verify: "lazy": check each part of the files when it is read. "full": check all now.
      prefetch, batch_size, episode_end, on_read: As for `Buffer`.
      memory, cache: As for `storages.DataSet`.
    Returns:
      The buffer and its state.
    Raises:
      FileNotFoundError: there is no data set, or it is unfinished.
      StoreCorrupted: it is damaged.
      ValueError: rows lack leaves that the view or the sampler reads; or a leaf has 64 bits and x64 is off.
    Cost: about 30 ms for a million Atari frames, and the same for the anchors of a view that reads neighbours.

    Example:
      >>> import fbuf, jax, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     made = fbuf.interop.from_arrays({"t": np.arange(6)}, episode_end=()).save(f"{folder}/six")
      ...     buffer, state = fbuf.datasets.open(f"{folder}/six", sampler=fbuf.samplers.Epoch(shuffle=False))
      ...     state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> batch.data["t"].tolist()
      [0, 1, 2, 3]
    """
    check_choice("fbuf.datasets.open", "verify", verify, ("full", "lazy"))
    if verify == "full":
        dataset.DataSet.open(path, verify="full").close()
    about = dataset.load(path)
    storage = DataSet(dataset.root(path), memory=memory, cache=cache)
    settings: dict[str, Any] = {"episode_end": episode_end, "prefetch": prefetch, "batch_size": batch_size}
    buffer = _buffer(about.rows, storage, view, sampler, on_read=on_read, **settings)
    return buffer, buffer.init(example(about.schema))


def _buffer(rows: int, storage: DataSet, view: View | None, sampler: Sampler | None, **settings: Any) -> Buffer:
    view, sampler = Row() if view is None else view, Uniform() if sampler is None else sampler
    return Buffer(rows, storage=storage, sampler=sampler, view=view, writer=Frozen(), **settings)


def check(
    path: str | os.PathLike[str],
    view: View | None,
    sampler: Sampler | None,
    schema: dataset.Schema | None = None,
    **settings: Any,
) -> None:
    """Raise, before a data set is written, what `open` would raise for its view and sampler.

    Args:
      view: None: the default view; `Transition` fits wherever another default does.
      schema: Of the rows, if known.
      settings: Other arguments of `open`, as for `Buffer`.
    """
    if view is None:
        view = Transition(autoreset="same_step") if schema is None else default_view(schema.names, _MANY)
    buffer = _buffer(_MANY, DataSet(os.fspath(path)), view, sampler, **settings)
    if schema is not None:
        init.checked_spec(buffer, "fbuf.datasets.open", example(schema))


def example(schema: dataset.Schema) -> PyTree:
    """Return one row of a data set, as shapes.

    Raises:
      ValueError: x64 is off, and a leaf has 64 bits. StoreCorrupted: the leaves do not fit the structure.
    """
    leaves: dict[str, Any] = {}
    for leaf in schema.leaves:
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(
                f"fbuf.datasets: leaf '{leaf.name}' is {leaf.dtype}, but x64 is off; expected it on. Call "
                f"jax.config.update('jax_enable_x64', True), or make the data set with {NARROW[leaf.dtype.name]}."
            )
        leaves[leaf.name] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    with contextlib.suppress(ValueError, TypeError):
        if schema.structure is None:
            row = leaves[""] if list(leaves) == [""] else nested(leaves)
        else:
            row = row_schema.decode(schema.structure).unflatten(leaves.values())
        if named_leaves(row) == leaves:
            return row
    raise StoreCorrupted(f"fbuf.datasets: leaves {', '.join(leaves)} do not fit {str(schema.structure)[:200]}.")


def to_path(call: str, name: str, value: Any, other: str = "") -> Path:
    """Return an argument as a path. Raises TypeError: it is not one."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        what = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
        raise TypeError(f"{call}: {name} is {what}; expected the path of a folder{other and ', '}{other}.")
    return Path(value).expanduser()


def default_root() -> Path:
    """Return `$FBUF_DATASETS`, else `~/.cache/fbuf/datasets` (or below `$XDG_CACHE_HOME`)."""
    if root := os.environ.get("FBUF_DATASETS"):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fbuf" / "datasets"


def root_of(call: str, root: str | os.PathLike[str] | None) -> Path:
    """Return the folder passed, or the default. Raises TypeError: it is not a path."""
    return (default_root() if root is None else to_path(call, "root", root, "or None for the default one")).absolute()


_CALL = "fbuf.datasets.delete"
_LINE = 200  # characters


@dataclasses.dataclass(frozen=True, repr=False)
class Info:
    """Hold the figures of a data set. It prints as a table, also in notebooks.

    Attributes:
      path: Its folder.
      finished: Whether it can be opened.
      rows: Its rows; if unfinished, the rows of its segments.
      segments: By number of the segment: rows used, rows stored, bytes on disk.
      disk: Bytes of all files of its segments.
      raw: Bytes of its rows uncompressed.
      leaves: `"uint8[84, 84]"` by name.
      unused: Segments that are stored but not used.
      meta: The metadata stored with it.
    """

    path: str
    finished: bool
    rows: int
    segments: Mapping[int, tuple[int, int, int]]
    disk: int
    raw: int
    leaves: Mapping[str, str]
    unused: tuple[int, ...]
    meta: Mapping[str, Any]

    @property
    def ratio(self) -> float:
        """Raw bytes over bytes on disk."""
        return self.raw / self.disk if self.disk else 0.0

    def __repr__(self) -> str:
        return "\n".join([self._title(), *(f"  {label:<11} {text}" for label, text in self._lines())])

    def _repr_html_(self) -> str:
        return html(self._title(), [Section("data set", (), tuple(self._lines()))])

    def _title(self) -> str:
        return f"{self.path}{'' if self.finished else ' (not finished)'}"

    def _lines(self) -> list[tuple[str, str]]:
        lines = [
            ("rows", f"{self.rows:,} in {counted(len(self.segments), 'segment')}"),
            ("on disk", f"{self.disk:,} bytes, {self.disk / self.rows if self.rows else 0:.1f} a row"),
            ("raw", f"{self.raw:,} bytes, {self.ratio:.1f} times as many"),
            ("leaves", ", ".join(f"{name} {text}" for name, text in self.leaves.items())),
        ]
        lines += [("not used", f"segments {', '.join(map(str, self.unused))}")] if self.unused else []
        return lines + [(printable(key), _short(key, value)) for key, value in self.meta.items()]


def info(path: str | os.PathLike[str]) -> Info:
    """Return the figures of a data set, finished or not.

    Raises:
      FileNotFoundError: there is no data set at `path`. StoreCorrupted: its manifest is damaged.
    Cost: reads the manifests of its segments.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> arrays = {"obs": np.zeros((100, 3), np.float32), "done": np.arange(100) % 10 == 9}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = f"{folder}/episodes"
      ...     buffer, state = fbuf.interop.from_arrays(arrays, episode_end=("done",)).save(path)
      ...     print(fbuf.datasets.info(path).rows)
      100
    """
    base = dataset.root(path)
    found = dataset.committed(base)
    segments = {number: (segment.rows, segment.rows, segment.nbytes) for number, segment in found.items()}
    finished, meta = False, {}
    try:
        manifest = dataset.load(base)
    except FileNotFoundError:
        if not found:
            raise
        schema = next(iter(found.values())).schema
    else:
        schema, meta = manifest.schema, manifest.meta
        current = {
            n: size
            for n, size in segments.items()
            if (n, found[n].save) in {(p.number, p.save) for p in manifest.segments}
        }
        finished = all(part.number in current for part in manifest.segments)
        segments = {part.number: (part.rows, *current.get(part.number, (0, 0, 0))[1:]) for part in manifest.segments}
    rows = sum(used for used, _, _ in segments.values())
    return Info(
        path=base,
        finished=finished,
        rows=rows,
        segments=segments,
        disk=sum(segment.nbytes for segment in found.values()),
        raw=rows * schema.row_bytes,
        leaves=schema.texts,
        unused=tuple(number for number in found if number not in segments),
        meta=meta,
    )


def verify(path: str | os.PathLike[str]) -> None:
    """Read every byte of a data set and compare its checksums.

    Raises:
      FileNotFoundError: there is no data set, or it is unfinished, or a segment is missing.
      StoreCorrupted: the data set is damaged; the error names the segment and the remedy.
    Cost: each byte is read once. Memory: as for opening it.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> arrays = {"obs": np.zeros((100, 3), np.float32), "done": np.arange(100) % 10 == 9}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = f"{folder}/episodes"
      ...     buffer, state = fbuf.interop.from_arrays(arrays, episode_end=("done",)).save(path)
      ...     fbuf.datasets.verify(path)
    """
    dataset.DataSet.open(path, verify="full").close()


def delete(path: str | os.PathLike[str]) -> None:
    """Remove a data set, finished or not, without confirmation. Other files in its folder stay.

    Raises:
      FileNotFoundError: there is no data set at `path`.
      BlockingIOError: it is open in this process (by a live state or a pending computation), or another process is making it.
      OSError: a file cannot be removed.

    Example:
      >>> import fbuf, numpy as np, tempfile
      >>> arrays = {"obs": np.zeros((100, 3), np.float32), "done": np.arange(100) % 10 == 9}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = f"{folder}/episodes"
      ...     buffer, state = fbuf.interop.from_arrays(arrays, episode_end=("done",)).save(path)
      ...     del state
      ...     fbuf.datasets.delete(path)
    """
    base = dataset.root(path)
    if not dataset.is_dataset(base):
        raise FileNotFoundError(errno.ENOENT, f"{_CALL}: there is no data set at {base}; nothing was removed")
    if dataset.is_open(base):  # perhaps by unreachable states
        gc.collect()
        lifetime.sweep()
    if dataset.is_open(base):
        text = f"{_CALL}: {base} is open in this process; nothing was removed. Drop its states: del buffer, state."
        raise BlockingIOError(errno.EWOULDBLOCK, text)
    with exclusive(_CALL, Path(base), patience=0):
        shutil.rmtree(os.path.join(base, DOWNLOADS), ignore_errors=True)
        dataset.remove(base)
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(base)


def _short(key: str, value: Any) -> str:
    """Return a value as one line."""
    text = printable(str(value))
    if len(text) <= _LINE:
        return text
    return f"{len(value)} entries: .meta[{key!r}]" if isinstance(value, (list, dict)) else text[: _LINE - 3] + "..."
