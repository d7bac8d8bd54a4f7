"""Where the pieces of a data set lie, and which of them are whole."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from typing import Any

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.filesystem import generations as generations_of
from fbuf._formats.checkpoint.filesystem import is_ours, manifest_name
from fbuf._formats.checkpoint.read import Saved
from fbuf._formats.dataset.schema import Schema
from fbuf._host.types import StoreCorrupted

MOST_PIECES = 1 << 20
PIECES = "pieces"
_NAME = re.compile(r"0|[1-9][0-9]{0,6}")
VERSION = 1


@dataclass(frozen=True)
class PieceInfo:
    """A piece that is whole, as far as its manifest and the sizes of its files say."""

    rows: int
    nbytes: int  # of its files
    meta: dict[str, Any]
    schema: Schema
    save: str  # id of the save that wrote it


def root(path: str | os.PathLike[str]) -> str:
    """A path as text."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"fbuf.datasets: path is {path!r}; expected the path of a folder.")
    return os.path.realpath(os.path.expanduser(str(os.fspath(path))))


def folder(path: str, number: int) -> str:
    """Of a piece."""
    if type(number) is not int or not 0 <= number < MOST_PIECES:
        raise ValueError(f"fbuf.datasets: piece is {number!r}; expected an int from 0 to {MOST_PIECES - 1}.")
    return os.path.join(path, PIECES, str(number))


def numbers(path: str) -> list[int]:
    """Of all pieces of which there is a folder."""
    try:
        names = os.listdir(os.path.join(path, PIECES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name) for name in names if _NAME.fullmatch(name) and int(name) < MOST_PIECES)


def is_committed(path: str, number: int) -> bool:
    """Whether a piece has a manifest."""
    try:
        return bool(generations_of(os.listdir(folder(path, number))))
    except (FileNotFoundError, NotADirectoryError):
        return False


def info_of(saved: Saved) -> PieceInfo:
    """What a manifest says of a piece. Raises StoreCorrupted: it is none."""
    about = saved.meta
    try:
        if about["piece"]["version"] != VERSION or type(about["meta"]) is not dict:
            raise ValueError(f"version {str(about['piece']['version'])[:20]}")
        rows = about["piece"]["rows"]
        if type(rows) is not int or not 0 < rows < 1 << 40:
            raise ValueError(f"it has {str(rows)[:40]} rows")
        schema = Schema.from_json(about["schema"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreCorrupted(f"{saved.path} does not describe a piece of a data set ({error!r:.200})") from None
    nbytes = sum(entry.size for entry in saved.manifest.files)
    return PieceInfo(rows, nbytes, about["meta"], schema, saved.manifest.save)


def open_piece(path: str, number: int) -> Saved:
    """A piece, open for reading: its manifest, and sizes and headers of its files, are what was written.

    Raises:
      CheckpointNotFound: it is not there. StoreCorrupted: it is damaged.
    """
    return checkpoint.read(folder(path, number), verify="lazy")


def committed(path: str | os.PathLike[str]) -> dict[int, PieceInfo]:
    """Pieces that are whole, by number; those that are damaged or were never finished are left out."""
    base, found = root(path), {}
    for number in numbers(base):
        with contextlib.suppress(checkpoint.CheckpointNotFound, StoreCorrupted), open_piece(base, number) as saved:
            found[number] = info_of(saved)
    return found


def discard(path: str | os.PathLike[str], number: int) -> None:
    """Removes a piece, whole or not; nothing happens if there is none. Its manifest goes first."""
    base = root(path)
    where = folder(base, number)
    try:
        names = os.listdir(where)
    except FileNotFoundError:
        return
    for generation in generations_of(names):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(where, manifest_name(generation)))
    for name in names:
        if is_ours(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(where, name))
    with contextlib.suppress(OSError):  # something else lies there
        os.rmdir(where)
