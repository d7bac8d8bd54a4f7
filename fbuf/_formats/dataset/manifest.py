"""`dataset.json`: which rows of which pieces make a data set, in order. Two lines of JSON, like a checkpoint's manifest.

The first line gives the size and crc32 of the second, so that the file is whole or refused; it is put in place at once
(rename), so that whatever happens there is the one before or this one. A piece is named by its number and by the random id of
the save that wrote it: one that was written anew since makes the data set unfinished, until `finish` is called again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.data_file import open_plain
from fbuf._formats.checkpoint.errors import VersionError
from fbuf._formats.checkpoint.filesystem import DISK, Disk, read_into, sync_folder, write_all
from fbuf._formats.checkpoint.json_limits import check_text
from fbuf._formats.checkpoint.write import check_meta
from fbuf._formats.dataset import directory
from fbuf._formats.dataset.schema import TRUNCATED, Schema
from fbuf._host.io.file import annotate_os_error
from fbuf._host.types import StoreCorrupted

NAME = "dataset.json"
MOST_BYTES = 1 << 26
_MOST_HEAD = 256
_HEAD = re.compile(rb'\{"format":"fbuf data set","version":([0-9]{1,9}),"bytes":([0-9]{1,9}),"crc32":([0-9]{1,10})\}')
_SAVE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Used:
    """The rows of a piece that a data set has.

    Attributes:
      number: The piece's.
      begin, stop: Rows `begin` to `stop - 1` of it; `stop` None: to its end.
      cut: The last of them is followed by something else: there the leaf `truncated` reads True.
    """

    number: int
    begin: int = 0
    stop: int | None = None
    cut: bool = False


@dataclass(frozen=True)
class Part:
    """The same, as the file has it."""

    number: int
    save: str
    begin: int
    stop: int
    cut: bool

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.begin


@dataclass(frozen=True)
class Manifest:
    """What a data set is."""

    schema: Schema
    parts: tuple[Part, ...]
    meta: dict[str, Any]

    @property
    def rows(self) -> int:
        """Of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def identity(self) -> str:
        """Names these very rows: the same for copies of the files, another for whatever else."""
        told = json.dumps([[p.number, p.save, p.begin, p.stop, p.cut] for p in self.parts])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def finish(
    path: str | os.PathLike[str],
    pieces: Sequence[Used],
    meta: dict[str, Any] | None = None,
    *,
    sync: bool = True,
    disk: Disk = DISK,
) -> Manifest:
    """Says which pieces make the data set, in order; may be said again, with others.

    Args:
      path: The data set's folder.
      pieces: Each once, in the order of their rows.
      meta: What else to keep, as JSON.
    Raises:
      ValueError: a piece is not there, comes twice, has not these rows, or other leaves than the first.
      StoreCorrupted: a piece is damaged. OSError: the disk is full, or fails; what was there is as before.
    """
    base = directory.root(path)
    meta = {} if meta is None else meta
    check_meta(meta)
    if not pieces or len({used.number for used in pieces}) != len(pieces):
        raise ValueError(f"finish: pieces are {[u.number for u in pieces]}; expected one or more, each once.")
    schema: Schema | None = None
    parts = []
    for used in pieces:
        try:
            with directory.open_piece(base, used.number) as saved:
                info = directory.info_of(saved)
        except checkpoint.CheckpointNotFound:
            raise ValueError(
                f"finish: piece {used.number} is not at {base}; expected it committed. Leave it out, or write it."
            ) from None
        schema = info.schema if schema is None else schema
        if info.schema.texts != schema.texts or info.schema.structure != schema.structure:
            raise ValueError(
                f"finish: rows of piece {used.number} are {info.schema.texts}; expected {schema.texts}, as in piece "
                f"{pieces[0].number}."
            )
        if info.schema.kinds != schema.kinds:
            raise ValueError(
                f"finish: leaves of piece {used.number} are kept as {info.schema.kinds}; expected {schema.kinds}, as in piece "
                f"{pieces[0].number}: rows of a chunk must be as many. Write it anew, with the same codec."
            )
        stop = info.rows if used.stop is None else used.stop
        if not 0 <= used.begin < stop <= info.rows:
            raise ValueError(
                f"finish: rows {used.begin} to {stop} of piece {used.number} are asked for; it has {info.rows}."
            )
        if used.cut and schema.texts.get(TRUNCATED) != "bool[]":
            raise ValueError(
                f"finish: piece {used.number} is cut, but rows have no leaf '{TRUNCATED}' of bool[], in which that would show "
                f"(they have {', '.join(schema.names)})."
            )
        parts.append(Part(used.number, info.save, used.begin, stop, bool(used.cut)))
    assert schema is not None
    manifest = Manifest(schema, tuple(parts), meta)
    _publish(base, encode(manifest), sync, disk)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """As it is written. Raises ValueError: it would be too large."""
    body = _dumps(
        {
            "version": directory.VERSION,
            "schema": manifest.schema.to_json(),
            "pieces": [[p.number, p.save, p.begin, p.stop, p.cut] for p in manifest.parts],
            "meta": manifest.meta,
        }
    )
    check_text(body)
    head = _dumps(
        {"format": "fbuf data set", "version": directory.VERSION, "bytes": len(body), "crc32": zlib.crc32(body)}
    )
    text = head + b"\n" + body + b"\n"
    if len(text) > MOST_BYTES:
        raise ValueError(f"finish: {NAME} would have {len(text)} bytes; expected at most {MOST_BYTES}. Keep less meta.")
    return text


def _dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _publish(base: str, text: bytes, sync: bool, disk: Disk) -> None:
    path, new = os.path.join(base, NAME), os.path.join(base, NAME + ".new")
    instead = "what was there is as before"
    with annotate_os_error("make", new, instead):
        fd = disk.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, new, text, 0)
        if sync:
            with annotate_os_error("sync", new, instead):
                disk.fsync(fd)
    finally:
        disk.close(fd)
    with annotate_os_error("rename", new, instead):
        disk.rename(new, path)
    if sync:
        sync_folder(disk, base)


def load(path: str | os.PathLike[str], disk: Disk = DISK) -> Manifest:
    """What `finish` wrote.

    Raises:
      FileNotFoundError: there is no data set, or it is not finished.
      StoreCorrupted: the file is damaged. VersionError: a later release wrote it.
    """
    base = directory.root(path)
    where = os.path.join(base, NAME)
    if not os.path.lexists(where):
        raise FileNotFoundError(errno.ENOENT, missing(base))
    fd, size = open_plain(disk, where)
    try:
        if size > MOST_BYTES:
            raise StoreCorrupted(f"{where} has {size} bytes; expected at most {MOST_BYTES}")
        text = bytearray(size)
        got = read_into(disk, fd, where, memoryview(text), 0)
    finally:
        disk.close(fd)
    try:
        return decode(bytes(text[:got]))
    except VersionError as error:
        raise VersionError(f"fbuf.datasets: {where} {error}.") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise StoreCorrupted(
            f"{where} is damaged: {type(error).__name__}: {str(error)[:300]}. Its pieces may be whole: finish it again, or "
            f"copy the file from where it came."
        ) from None


def is_dataset(path: str | os.PathLike[str]) -> bool:
    """Whether a data set lies at a path, finished or not, whole or not."""
    base = directory.root(path)
    return os.path.lexists(os.path.join(base, NAME)) or any(
        directory.is_committed(base, number) for number in directory.numbers(base)
    )


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a data set: first what says that it is one, then its pieces; other files stay. Raises OSError."""
    base = directory.root(path)
    for name in (NAME, NAME + ".new"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(base, name))
    for number in directory.numbers(base):
        directory.discard(base, number)
    for where in (os.path.join(base, directory.PIECES), base):
        with contextlib.suppress(OSError):  # something else lies there
            os.rmdir(where)


def missing(base: str) -> str:
    """Why there is no data set."""
    there = directory.numbers(base)
    if there:
        return (
            f"fbuf.datasets: the data set at {base} is not finished: {len(there)} pieces are there, but no {NAME}. Run again "
            f"what was making it: pieces that are whole stay."
        )
    return f"fbuf.datasets: there is no data set at {base}; expected a folder with {NAME}. Give the path that it was made at."


def decode(text: bytes) -> Manifest:
    """A data set's manifest from its bytes, which anyone may have written. Raises ValueError and the like."""
    head, _, rest = text[:_MOST_HEAD].partition(b"\n")
    found = _HEAD.fullmatch(head)
    if not found:
        raise ValueError("its first line is not that of a data set")
    version, size, crc = (int(number) for number in found.groups())
    if version > directory.VERSION:
        raise VersionError(
            f"is of version {version}; expected {directory.VERSION} or less. Use the release of fbuf that wrote it"
        )
    body = text[len(head) + 1 : -1]
    if len(body) != size or text[-1:] != b"\n":
        raise ValueError(f"it has {len(text)} bytes; its first line says {len(head) + size + 2}")
    if zlib.crc32(body) != crc:
        raise ValueError(f"its second line has crc32 {zlib.crc32(body)}; its first says {crc}")
    check_text(body)
    value = json.loads(body.decode("ascii"), parse_constant=_no_constant)
    if type(value) is not dict or set(value) != {"version", "schema", "pieces", "meta"}:
        raise TypeError("it is no object of version, schema, pieces and meta")
    if value["version"] != version or type(value["meta"]) is not dict or type(value["pieces"]) is not list:
        raise TypeError("its version, meta or pieces are none")
    schema = Schema.from_json(value["schema"])
    parts = tuple(_part(entry) for entry in value["pieces"])
    if not parts or len({part.number for part in parts}) != len(parts):
        raise ValueError("it has no pieces, or one twice")
    if any(part.cut for part in parts) and schema.texts.get(TRUNCATED) != "bool[]":
        raise ValueError(f"a piece is cut, and rows have no leaf '{TRUNCATED}'")
    return Manifest(schema, parts, value["meta"])


def _part(entry: Any) -> Part:
    if type(entry) is not list or [type(item) for item in entry] != [int, str, int, int, bool]:
        raise TypeError(f"{str(entry)[:80]} in place of a piece")
    number, save, begin, stop, cut = entry
    if not (0 <= number < directory.MOST_PIECES and 0 <= begin < stop < 1 << 40 and _SAVE.fullmatch(save)):
        raise ValueError(f"{str(entry)[:80]} in place of a piece")
    return Part(number, save, begin, stop, cut)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
