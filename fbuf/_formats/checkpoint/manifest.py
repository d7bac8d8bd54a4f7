"""The manifest: two lines of JSON that name every block, its place and its checksum.

The first line holds the size and crc32 of the second. `decode` treats the text as untrusted: it limits size, depth and number
of values before parsing, and checks that blocks fit their files and do not overlap before anything is allocated. File and
dtype names come from closed sets.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.dtypes import dtype_named
from fbuf._formats.checkpoint.errors import VersionError
from fbuf._formats.checkpoint.filesystem import is_data
from fbuf._formats.checkpoint.layout import MOST_AXES, Layout
from fbuf._host.types import Array

VERSION = 1
MOST_BYTES = 1 << 26


@dataclass(frozen=True)
class FileEntry:
    """A data file: its size, size and checksum of its header, the save that wrote it, and whether that waited for the disk."""

    name: str
    size: int
    header: int
    crc: int
    save: str
    synced: bool


@dataclass(frozen=True)
class ArrayEntry:
    """An array: where each block lies, int64[count] each; `file` counts the manifest's files."""

    layout: Layout
    file: Array
    offset: Array
    crc: Array
    marks: list[str | None] | None


@dataclass(frozen=True)
class Manifest:
    """One generation."""

    generation: int
    save: str
    meta: dict[str, Any]
    files: list[FileEntry]
    arrays: dict[str, ArrayEntry]


def encode(manifest: Manifest) -> bytes:
    """As it is written. Raises ValueError: it would be too large."""
    body = _dumps(
        {
            "version": VERSION,
            "generation": manifest.generation,
            "save": manifest.save,
            "meta": manifest.meta,
            "files": [
                {
                    "name": f.name,
                    "bytes": f.size,
                    "header": f.header,
                    "crc32": f.crc,
                    "save": f.save,
                    "synced": f.synced,
                }
                for f in manifest.files
            ],
            "arrays": {name: _array(entry) for name, entry in manifest.arrays.items()},
        }
    )
    if body.count(b",") > MOST_VALUES:  # as `check_text` counts; how deep `meta` goes was looked at before
        raise ValueError(f"fbuf.save: the manifest would have more than {MOST_VALUES} values; expected less.")
    head = _dumps({"format": "fbuf checkpoint", "version": VERSION, "bytes": len(body), "crc32": zlib.crc32(body)})
    text = head + b"\n" + body + b"\n"
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"fbuf.save: the manifest would have {len(text)} bytes; expected at most {MOST_BYTES}. Save larger blocks, or a "
            f"smaller meta."
        )
    return text


def _dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _array(entry: ArrayEntry) -> dict[str, Any]:
    layout = entry.layout
    cut = {"block": layout.block} if layout.cuts is None else {"cuts": layout.cuts, "keys": layout.keys}
    return {
        "dtype": layout.dtype.name,
        "shape": layout.shape,
        **cut,
        "file": entry.file.tolist(),
        "offset": entry.offset.tolist(),
        "crc32": entry.crc.tolist(),
        **({} if entry.marks is None else {"mark": entry.marks}),
    }


MOST_DEPTH = 64
MOST_VALUES = 1 << 23
_PIECE = 1 << 20


def check_text(text: bytes) -> None:
    """Raises ValueError if JSON text is too deep, or has too many values, to be parsed. Cost: 20 ns a byte."""
    values = text.count(b",")
    if values > MOST_VALUES:
        raise ValueError(f"it has {values} values; expected at most {MOST_VALUES}")
    quoted, slashes, depth = False, 0, 0  # slashes: those just before the piece
    for at in range(0, len(text), _PIECE):
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - at), at)
        before = _slashes(piece == 92, slashes)  # in front of each byte, and of the next piece's first
        quote = (piece == 34) & (before[:-1] % 2 == 0)
        inside = (np.cumsum(quote, dtype=np.int32) + quoted) % 2 == 1
        lower = piece | 32  # [ and { differ from ] and } by 2, and from one another by 32
        step = ((lower == 123).astype(np.int32) - (lower == 125)) * ~inside
        run = np.cumsum(step, dtype=np.int64) + depth
        if run.max() > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
        quoted, slashes, depth = bool(inside[-1]), int(before[-1]), int(run[-1])


def _slashes(slash: Array, before: int) -> Array:
    """How many backslashes there are just before each byte, and after the last: int32[N + 1]."""
    place: Array = np.arange(1, len(slash) + 1, dtype=np.int32)
    last: Array = np.concatenate([np.full(1, -before, np.int32), np.where(slash, -before, place)])  # no backslash there
    return np.concatenate([np.zeros(1, np.int32), place]) - np.maximum.accumulate(last)


_HEAD_BYTES = 256
_LARGEST = 1 << 48  # rows, bytes and offsets
_HEAD = re.compile(rb'\{"format":"fbuf checkpoint","version":([0-9]{1,9}),"bytes":([0-9]{1,9}),"crc32":([0-9]{1,10})\}')
_SAVE = re.compile(r"[0-9a-f]{32}")


class Damaged(Exception):
    """What is wrong with a file, for whoever knows its path."""


def decode(text: bytes, generation: int) -> Manifest:
    """A manifest from its bytes, everything checked but the files themselves.

    Raises:
      Damaged: it is not what was written.
      VersionError: a later release wrote it; the message lacks the path.
    """
    head, _, rest = text[:_HEAD_BYTES].partition(b"\n")
    found = _HEAD.fullmatch(head)
    if not found:
        raise Damaged("its first line is not that of a manifest")
    version, size, crc = (int(number) for number in found.groups())
    if len(text) != len(head) + size + 2 or text[-1:] != b"\n":
        raise Damaged(f"it has {len(text)} bytes; its first line says {len(head) + size + 2}")
    body = text[len(head) + 1 : -1]
    if zlib.crc32(body) != crc:
        raise Damaged(f"its second line has crc32 {zlib.crc32(body)}; its first says {crc}")
    del text, rest
    if version > VERSION and f'"version":{VERSION},'.encode() not in body[:64]:
        raise VersionError(
            f"is of version {version}; expected {VERSION} or less. Use the release of fbuf that wrote it"
        )
    try:
        check_text(body)
        value = json.loads(body.decode("ascii"), parse_constant=_no_constant)  # of bytes it would guess the encoding
        del body
        return _manifest(value, version, generation)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise Damaged(f"it does not describe a checkpoint ({type(error).__name__}: {str(error)[:200]})") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _manifest(value: Any, version: int, generation: int) -> Manifest:
    value = _mapping(value)
    if version != VERSION or value["version"] != VERSION:
        raise ValueError(f"version {version} in the first line, {value['version']!r} in the second")
    if value["generation"] != generation:
        raise ValueError(f"it is of generation {value['generation']!r} and has the name of {generation}")
    files = [_file(entry) for entry in _list(value["files"])]
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    arrays = {_name(name): _entry(entry, files) for name, entry in _mapping(value["arrays"]).items()}
    _check_overlap(arrays, files)
    return Manifest(generation, _save(value["save"]), _mapping(value["meta"]), files, arrays)


def _file(value: Any) -> FileEntry:
    value = _mapping(value)
    name = value["name"]
    if type(name) is not str or not is_data(name):
        raise ValueError(f"a file has the name {str(name)[:80]!r}")
    size, header = _whole(value["bytes"]), _whole(value["header"])
    if not 8 <= header <= size:
        raise ValueError(f"{name} has {size} bytes and a header of {header}")
    return FileEntry(name, size, header, _whole(value["crc32"]), _save(value["save"]), value["synced"] is True)


def _entry(value: Any, files: list[FileEntry]) -> ArrayEntry:
    value = _mapping(value)
    shape = tuple(_whole(n) for n in _list(value["shape"]))
    dtype = dtype_named(_text(value["dtype"]))
    if len(shape) > MOST_AXES or math.prod(n for n in shape if n) * dtype.itemsize >= _LARGEST:
        raise ValueError(f"a shape is {str(list(shape))[:80]}")
    if "cuts" in value:
        cuts, keys = _column(value["cuts"]), [_name(k) for k in _list(value["keys"])]
        ends = len(cuts) == len(keys) + 1 and bool(shape) and cuts[0] == 0 and cuts[-1] == shape[0]
        if not ends or (np.diff(cuts) < 0).any() or len(set(keys)) != len(keys):
            raise ValueError("cuts do not rise from 0 to the length of their array, or keys repeat")
        layout = Layout(shape, dtype, None, tuple(cuts.tolist()), tuple(keys))
    else:
        layout = Layout(shape, dtype, max(_whole(value["block"]), 1))
    columns = [_column(value[name]) for name in ("file", "offset", "crc32")]
    marks = None if "mark" not in value else _list(value["mark"])
    if any(len(column) != layout.count for column in (*columns, columns[0] if marks is None else marks)):
        raise ValueError(f"an array of {layout.count} blocks has places or checksums for another number")
    if marks is not None and not {type(mark) for mark in marks} <= {str, type(None)}:
        raise ValueError("a mark is no text")
    if layout.count and columns[0].max() >= len(files):
        raise ValueError(f"a block lies in file {columns[0].max()} of {len(files)}")
    file, offset, crc = columns
    return ArrayEntry(layout, file, offset, crc, marks)


def _check_overlap(arrays: Mapping[str, ArrayEntry], files: list[FileEntry]) -> None:
    """Refuses blocks outside the data of their file, and two that share bytes."""
    none: list[Array] = [np.zeros(0, np.int64)]
    file = np.concatenate([a.file for a in arrays.values()] or none)
    start = np.concatenate([a.offset for a in arrays.values()] or none)
    stop = start + np.concatenate([a.layout.sizes for a in arrays.values()] or none)
    if not len(file):
        return
    if (start < np.array([f.header for f in files])[file]).any() or (
        stop > np.array([f.size for f in files])[file]
    ).any():
        raise ValueError("a block lies outside its file")
    order = np.lexsort((stop, start, file))
    file, start, stop = file[order], start[order], stop[order]
    if ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any():
        raise ValueError("two blocks overlap")


def _mapping(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"{type(value).__name__} in place of an object")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} in place of text")
    return value


def _name(value: Any) -> str:
    if not _text(value).isprintable():
        raise ValueError(f"{value[:40]!r} in place of a name")
    return str(value)


def _save(value: Any) -> str:
    if not _SAVE.fullmatch(_text(value)):
        raise ValueError("an id of a save is no 32 hexadecimal digits")
    return str(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"{str(value)[:40]} in place of a whole number")
    return value


def _column(value: Any) -> Array:
    if set(map(type, _list(value))) - {int}:
        raise TypeError("a column holds something else than whole numbers")
    column: Array = np.array(value, np.int64)
    if len(column) and not 0 <= column.min() <= column.max() < _LARGEST:
        raise ValueError("a column holds numbers out of range")
    return column
