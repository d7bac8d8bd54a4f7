"""The folders of a data set's segments, and which of them are complete."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.filesystem import Path, find_generations, is_checkpoint_name, manifest_name
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset.schema import Schema
from fbuf._host.types import StoreCorrupted

MAX_SEGMENTS = 1 << 20
SEGMENTS = "pieces"
_NAME = re.compile(r"0|[1-9][0-9]{0,6}")
VERSION = 1


@dataclass(frozen=True)
class SegmentInfo:
    """A segment that is complete by its manifest and the sizes of its files."""

    rows: int
    nbytes: int  # of its files
    meta: dict[str, Any]
    schema: Schema
    save: str  # id of the save that wrote it


def root(path: Path) -> str:
    """Return a path as an absolute, real path."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"fbuf.datasets: path is {path!r}; expected the path of a folder.")
    return os.path.realpath(os.path.expanduser(str(os.fspath(path))))


def folder(path: str, number: int) -> str:
    """Return the folder of a segment."""
    if type(number) is not int or not 0 <= number < MAX_SEGMENTS:
        raise ValueError(f"fbuf.datasets: segment is {number!r}; expected an int from 0 to {MAX_SEGMENTS - 1}.")
    return os.path.join(path, SEGMENTS, str(number))


def numbers(path: str) -> list[int]:
    """Return the numbers of all segments that have a folder."""
    try:
        names = os.listdir(os.path.join(path, SEGMENTS))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if _NAME.fullmatch(name) and int(name) < MAX_SEGMENTS)


def is_committed(path: str, number: int) -> bool:
    """Return whether a segment has a manifest."""
    try:
        return bool(find_generations(os.listdir(folder(path, number))))
    except (FileNotFoundError, NotADirectoryError):
        return False


def info_of(saved: Saved) -> SegmentInfo:
    """Return the contents of a segment's manifest. Raises StoreCorrupted: it is not a segment."""
    about = saved.meta
    try:
        if about["piece"]["version"] != VERSION or type(about["meta"]) is not dict:
            raise ValueError(f"version {str(about['piece']['version'])[:20]}")
        rows = about["piece"]["rows"]
        if type(rows) is not int or not 0 < rows < 1 << 40:
            raise ValueError(f"it has {str(rows)[:40]} rows")
        schema = Schema.from_json(about["schema"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupted(f"{saved.path} does not describe a segment of a data set ({error!r:.200})") from None
    nbytes = sum(entry.size for entry in saved.manifest.files)
    return SegmentInfo(rows, nbytes, about["meta"], schema, saved.manifest.save)


def open_segment(path: str, number: int) -> Saved:
    """Open a segment after checking its manifest, and the sizes and headers of its files.

    Raises:
      CheckpointNotFound: it is missing. StoreCorrupted: it is damaged.
    """
    return checkpoint.read(folder(path, number), verify="lazy")


def committed(path: Path) -> dict[int, SegmentInfo]:
    """Return the complete segments by number; damaged and unfinished ones are left out."""
    base, found = root(path), {}
    for number in numbers(base):
        with contextlib.suppress(checkpoint.CheckpointNotFound, StoreCorrupted), open_segment(base, number) as saved:
            found[number] = info_of(saved)
    return found


def discard(path: Path, number: int) -> None:
    """Remove a segment if it exists, its manifest first."""
    base = root(path)
    where = folder(base, number)
    try:
        names = os.listdir(where)
    except FileNotFoundError:
        return
    for name in (*map(manifest_name, find_generations(names)), *filter(is_checkpoint_name, names)):  # manifests first
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(where, name))
    with contextlib.suppress(OSError):  # it holds other files
        os.rmdir(where)
