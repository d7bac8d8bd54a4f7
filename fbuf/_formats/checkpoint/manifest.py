"""The manifest: two lines of JSON that name every block, its place and its checksum.

The first line holds the size and crc32 of the second. `decode` treats the text as untrusted: it limits size, depth and number
of values before parsing, and checks that blocks fit their files and do not overlap before anything is allocated. File and
dtype names come from closed sets. One array per property of all blocks parses ten times faster than one object per block.
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
from fbuf._formats.checkpoint.filesystem import is_data_name
from fbuf._formats.checkpoint.layout import MAX_AXES, Layout
from fbuf._host.types import Array


class CheckpointNotFound(FileNotFoundError):
    """There is no checkpoint at that path."""


class VersionError(ValueError):
    """Another release of fbuf wrote the checkpoint, with features that this release lacks."""


class SchemaError(ValueError):
    """The checkpoint holds other leaves, shapes, dtypes or settings than requested."""


VERSION = 1
MAX_BYTES = 1 << 26
MAX_DEPTH = 64
MAX_VALUES = 1 << 23
INVALID = (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError)
"""What `decode` may raise for an invalid text, besides VersionError."""
_STEP_BYTES = 1 << 20
_MAX_HEAD = 256
_LIMIT = 1 << 48  # rows, bytes and offsets
_HEAD = re.compile(rb'\{"format":"fbuf ([a-z ]+)","version":([0-9]{1,9}),"bytes":([0-9]{1,9}),"crc32":([0-9]{1,10})\}')
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_QUOTED = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|\\.', re.DOTALL)
"""Strings, and what is escaped elsewhere; possessive, so that a match takes no memory."""


@dataclass(frozen=True)
class FileEntry:
    """A data file: its size, the size and crc32 of its header, the save that wrote it, and whether it was synced."""

    name: str
    size: int
    header: int
    crc: int
    save: str
    synced: bool


@dataclass(frozen=True)
class ArrayEntry:
    """An array and where its blocks are, int64[num_blocks] each; `file` indexes the manifest's files."""

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
    """Return the manifest's text. Raises ValueError: it would be too large."""
    files = [
        {"name": f.name, "bytes": f.size, "header": f.header, "crc32": f.crc, "save": f.save, "synced": f.synced}
        for f in manifest.files
    ]
    value = {
        "version": VERSION,
        "generation": manifest.generation,
        "save": manifest.save,
        "meta": manifest.meta,
        "files": files,
        "arrays": {name: _array_json(entry) for name, entry in manifest.arrays.items()},
    }
    return encode_lines("fbuf.save", "checkpoint", VERSION, value)


def encode_lines(call: str, form: str, version: int, value: Any) -> bytes:
    """Return a value as two lines of JSON; the first identifies and checks the second."""
    body = _dumps(value)
    if body.count(b",") > MAX_VALUES:
        raise ValueError(f"{call}: the manifest would have more than {MAX_VALUES} values. Save larger blocks.")
    head = _dumps({"format": f"fbuf {form}", "version": version, "bytes": len(body), "crc32": zlib.crc32(body)})
    text = head + b"\n" + body + b"\n"
    if len(text) > MAX_BYTES:
        raise ValueError(
            f"{call}: the manifest has {len(text)} bytes; expected at most {MAX_BYTES}. Use larger blocks."
        )
    return text


def _dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _array_json(entry: ArrayEntry) -> dict[str, Any]:
    layout = entry.layout
    cut = {"block": layout.block} if layout.cuts is None else {"cuts": layout.cuts, "keys": layout.keys}
    places = {"file": entry.file.tolist(), "offset": entry.offset.tolist(), "crc32": entry.crc.tolist()}
    marks = {} if entry.marks is None else {"mark": entry.marks}
    return {"dtype": layout.dtype.name, "shape": layout.shape, **cut, **places, **marks}


def decode_lines(form: str, version: int, text: bytes) -> Any:
    """Parse what `encode_lines` wrote.

    Raises:
      VersionError: a later release wrote it; the message lacks the path.
      One of INVALID: the text is damaged.
    """
    head, _, _ = text[:_MAX_HEAD].partition(b"\n")
    found = _HEAD.fullmatch(head)
    if not found or found[1].decode() != form:
        raise ValueError(f"its first line is not that of a {form}")
    written, size, crc = (int(number) for number in found.groups()[1:])
    if len(text) != len(head) + size + 2 or text[-1:] != b"\n":
        raise ValueError(f"it has {len(text)} bytes; its first line says {len(head) + size + 2}")
    body = text[len(head) + 1 : -1]
    if zlib.crc32(body) != crc:
        raise ValueError(f"its second line has crc32 {zlib.crc32(body)}; its first says {crc}")
    if written > version and f'"version":{version},'.encode() not in body[:64]:
        raise VersionError(f"is of version {written}; expected {version} or less. Use the release that wrote it")
    check_json(body)
    # Of bytes, `json` would guess the encoding.
    value = json.loads(body.decode("ascii"), parse_constant=_refuse_constant)
    if written != version or _typed(value, dict)["version"] != version:
        raise ValueError(f"version {written} in the first line, {value['version']!r} in the second")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def check_json(text: bytes) -> None:
    """Raise ValueError if JSON text is too deep, or has too many values, to parse safely.

    Python's parser recurses, and creates an object of 50 bytes or more from two bytes of text. Cost: 10 ns a byte.
    """
    values = text.count(b",")
    if values > MAX_VALUES:
        raise ValueError(f"it has {values} values; expected at most {MAX_VALUES}")
    plain, depth = np.frombuffer(_QUOTED.sub(b"", text), np.uint8) | 32, 0  # [ and { differ by 32, ] and } too
    for at in range(0, len(plain), _STEP_BYTES):
        chars = plain[at : at + _STEP_BYTES]
        run = np.cumsum((chars == 123).astype(np.int8) - (chars == 125), dtype=np.int64) + depth
        if run.max() > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        depth = int(run[-1])


def decode(text: bytes, generation: int) -> Manifest:
    """Parse a manifest and check everything but the files themselves.

    Raises:
      As `decode_lines`.
    """
    value = decode_lines("checkpoint", VERSION, text)
    if value["generation"] != generation:
        raise ValueError(f"it is of generation {value['generation']!r} and has the name of {generation}")
    files = [_file(entry) for entry in _typed(value["files"], list)]
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    arrays = {_name(name): _array(entry, files) for name, entry in _typed(value["arrays"], dict).items()}
    _check_overlap(arrays, files)
    return Manifest(generation, check_save_id(value["save"]), _typed(value["meta"], dict), files, arrays)


def _file(value: Any) -> FileEntry:
    name = _typed(_typed(value, dict)["name"], str)
    if not is_data_name(name):
        raise ValueError(f"a file has the name {name[:80]!r}")
    size, header = _int(value["bytes"]), _int(value["header"])
    if not 8 <= header <= size:
        raise ValueError(f"{name} has {size} bytes and a header of {header}")
    return FileEntry(name, size, header, _int(value["crc32"]), check_save_id(value["save"]), value["synced"] is True)


def _array(value: Any, files: list[FileEntry]) -> ArrayEntry:
    shape = tuple(_int(n) for n in _typed(_typed(value, dict)["shape"], list))
    dtype = dtype_named(_typed(value["dtype"], str))
    if len(shape) > MAX_AXES or math.prod(n for n in shape if n) * dtype.itemsize >= _LIMIT:
        raise ValueError(f"a shape is {str(list(shape))[:80]}")
    if "cuts" in value:
        cuts, keys = _int_array(value["cuts"]), [_name(k) for k in _typed(value["keys"], list)]
        ends = len(cuts) == len(keys) + 1 and bool(shape) and cuts[0] == 0 and cuts[-1] == shape[0]
        if not ends or (np.diff(cuts) < 0).any() or len(set(keys)) != len(keys):
            raise ValueError("cuts do not rise from 0 to the length of their array, or keys repeat")
        layout = Layout(shape, dtype, None, tuple(cuts.tolist()), tuple(keys))
    else:
        layout = Layout(shape, dtype, max(_int(value["block"]), 1))
    file, offset, crc = columns = [_int_array(value[name]) for name in ("file", "offset", "crc32")]
    marks = None if "mark" not in value else _typed(value["mark"], list)
    if any(len(column) != layout.num_blocks for column in (*columns, file if marks is None else marks)):
        raise ValueError(f"an array of {layout.num_blocks} blocks has another number of places or checksums")
    if marks is not None and not {type(mark) for mark in marks} <= {str, type(None)}:
        raise ValueError("a mark is not text")
    if layout.num_blocks and file.max() >= len(files):
        raise ValueError(f"a block is in file {file.max()} of {len(files)}")
    return ArrayEntry(layout, file, offset, crc, marks)


def _check_overlap(arrays: Mapping[str, ArrayEntry], files: list[FileEntry]) -> None:
    """Raise ValueError if a block is outside its file's data, or two blocks share bytes."""
    if not any(entry.layout.num_blocks for entry in arrays.values()):
        return
    file = np.concatenate([a.file for a in arrays.values()])
    start = np.concatenate([a.offset for a in arrays.values()])
    stop = start + np.concatenate([a.layout.sizes for a in arrays.values()])
    header, size = np.array([f.header for f in files])[file], np.array([f.size for f in files])[file]
    if (start < header).any() or (stop > size).any():
        raise ValueError("a block is outside its file")
    order = np.lexsort((stop, start, file))
    file, start, stop = file[order], start[order], stop[order]
    if ((file[1:] == file[:-1]) & (start[1:] < stop[:-1])).any():
        raise ValueError("two blocks overlap")


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "text"}


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in place of {_KINDS[kind]}")
    return value


def _name(value: Any) -> str:
    if not _typed(value, str).isprintable():
        raise ValueError(f"{value[:40]!r} in place of a name")
    return str(value)


def check_save_id(value: Any) -> str:
    """Return the id of a save. Raises TypeError, ValueError: it is not 32 hexadecimal digits."""
    if not _SAVE_ID.fullmatch(_typed(value, str)):
        raise ValueError("the id of a save is not 32 hexadecimal digits")
    return str(value)


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"{str(value)[:40]} in place of a whole number")
    return value


def _int_array(value: Any) -> Array:
    if set(map(type, _typed(value, list))) - {int}:
        raise TypeError("a list of whole numbers holds something else")
    array: Array = np.array(value, np.int64)
    if len(array) and not 0 <= array.min() <= array.max() < _LIMIT:
        raise ValueError("a list of whole numbers holds one out of range")
    return array
