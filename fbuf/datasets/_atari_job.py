"""The job of a worker: one piece of a run, from a source to the data set. Jobs and what is known of files are JSON.

From a folder files are parsed where they are. Over a network they come to the disk first (under `arrivals/`, removed once
the piece is there): what had arrived when a process was killed need not come again, the listed hash is checked before
anything is made of the bytes, and a packed piece is small beside its seven gigabytes. Several pieces come at once, so
that some arrive while others are converted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fbuf import _pieces
from fbuf.datasets._atari_piece import INVALID_RANGE, KINDS, Damaged, convert
from fbuf.datasets._source import Bucket, Entry, FileCorrupted, Folder, Mirror, Retry, Source, fetch, rows, rows_of
from fbuf.datasets._source._fsspec import Fsspec

Array = np.ndarray[Any, Any]

ARRIVALS = "arrivals"
_BLOCK_ROWS = 512  # 3.6 MB of frames
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Bucket, Mirror, Folder, Fsspec)}
_NAME = re.compile("(" + "|".join(map(re.escape, KINDS)) + r")_ckpt\.(0|[1-9][0-9]{0,3})\.gz")


class Report(Protocol):
    """Told of bytes that arrived and rows that were read."""

    def __call__(self, *, nbytes: int = 0, rows: int = 0) -> None: ...


def by_piece(entries: Iterable[Entry], folder: str) -> dict[int, dict[str, Entry]]:
    """The files right in `folder` by number of piece and kind; what is called otherwise, or lies deeper, is not of a piece."""
    found: dict[int, dict[str, Entry]] = {}
    for entry in entries:
        if entry.name.startswith(folder) and (match := _NAME.fullmatch(entry.name[len(folder) :])):
            found.setdefault(int(match[2]), {})[match[1]] = entry
    return dict(sorted(found.items()))


def job_of(source: Source, path: str, number: int, files: dict[str, Entry], schema: _pieces.Schema) -> dict[str, Any]:
    """A job as JSON.

    Raises:
      TypeError: the source is one of the user's own, which has no form in JSON.
    """
    if type(source) not in _KINDS.values():
        raise TypeError(
            f"source is a {type(source).__name__}, which worker processes cannot be given; expected an address or a folder. "
            f"Pass workers=0 to read in this process."
        )
    return {
        "source": [type(source).__name__, dataclasses.asdict(source)],  # type: ignore[call-overload]
        "path": path,
        "number": number,
        "files": {kind: entry_json(entry) for kind, entry in files.items()},
        "schema": schema.to_json(),
    }


def entry_json(entry: Entry) -> dict[str, Any]:
    """A listed file as JSON."""
    return {**dataclasses.asdict(entry), "md5": None if entry.md5 is None else entry.md5.hex()}


def entry_of(said: dict[str, Any]) -> Entry:
    """The inverse."""
    return Entry(**{**said, "md5": None if said["md5"] is None else bytes.fromhex(said["md5"])})


def source_of(said: Any) -> Source:
    """A source from JSON, or what is one already."""
    if not isinstance(said, list):
        return said
    name, fields = said
    if "retry" in fields:
        fields = {**fields, "retry": Retry(**fields["retry"])}
    return _KINDS[name](**fields)


def run(job: dict[str, Any], report: Report) -> None:
    """Does a job.

    Raises:
      FileCorrupted, Damaged: a file is not what it should be. SourceError: it cannot be had now. OSError: of the disk.
    """
    source, number = source_of(job["source"]), job["number"]
    files = {kind: entry_of(said) for kind, said in job["files"].items()}
    if lacking := [kind for kind in KINDS if kind not in files and kind != INVALID_RANGE]:
        raise Damaged(f"{lacking[0]}_ckpt.{number}.gz is not there; expected six files of each piece")
    place = Path(job["path"], ARRIVALS, str(number))
    at_hand = _AtHand(source, files, place, report)
    meta = {"files": {kind: entry_json(entry) for kind, entry in files.items()}}
    convert(at_hand, job["path"], number, _pieces.Schema.from_json(job["schema"]), meta, lambda n: report(rows=n))
    at_hand.forget()


class _AtHand:
    """`Files` of one piece of a source."""

    def __init__(self, source: Source, files: dict[str, Entry], place: Path, report: Report) -> None:
        self._source, self._files, self._place, self._report = source, files, place, report

    def whole(self, kind: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], most: int) -> Array:
        if kind not in self._files:  # `invalid_range`, which says nothing that `add_count` does not
            return np.zeros(0, dtypes[0])
        with self._open(kind, dtype=dtypes, item=None if shape == () else ()) as stream:
            fits = (want in (None, got) for want, got in zip(shape, stream.shape, strict=False))
            if len(stream.shape) != len(shape) or not all(fits):
                raise Damaged(
                    f"{kind} has shape {list(stream.shape)}; expected {['rows' if n is None else n for n in shape]}"
                )
            return stream.array(most * stream.dtype.itemsize)

    def blocks(self, kind: str, dtype: str, shape: tuple[int, ...]) -> Generator[Array, None, None]:
        with self._open(kind, dtype=dtype, item=shape[1:], rows=shape[0]) as stream:
            yield from stream.blocks(_BLOCK_ROWS)

    def forget(self) -> None:
        """Removes what came to the disk."""
        if self._place.is_dir():
            for path in self._place.iterdir():
                path.unlink(missing_ok=True)
            for folder in (self._place, self._place.parent):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    @contextlib.contextmanager
    def _open(self, kind: str, **expected: Any) -> Iterator[Any]:
        entry, done = self._files[kind], 0

        def progress(there: int, total: int | None) -> None:
            nonlocal done
            self._report(nbytes=there - done)
            done = there

        here = self._place / entry.name.rpartition("/")[2]
        try:
            if isinstance(self._source, Folder):
                stream = rows(self._source, entry, progress=progress, **expected)
            else:
                fetch(self._source, entry, here, progress=progress)
                stream = rows_of(here, **expected)
            with stream:
                yield stream
        except (FileCorrupted, Damaged):
            here.unlink(missing_ok=True)
            raise
