"""Describe, verify and delete a data set."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fbuf._bridge import lifetime
from fbuf._core.text_table import Section, counted, html, printable
from fbuf._formats import dataset
from fbuf.datasets._atari.workers import DOWNLOADS
from fbuf.datasets._lock import exclusive

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
