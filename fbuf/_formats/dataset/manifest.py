"""`dataset.json`: which rows of which segments make up a data set, in order.

The file has the two lines of a checkpoint's manifest, and is renamed into place. A segment is named by its number and by the
random id of the save that wrote it: if a segment is rewritten, the data set is unfinished until `finish` is called again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import manifest as checkpoint_manifest
from fbuf._formats.checkpoint.data_file import read_plain
from fbuf._formats.checkpoint.filesystem import DISK, Disk, Path, sync_folder, write_partial
from fbuf._formats.checkpoint.write import check_meta
from fbuf._formats.dataset import directory
from fbuf._formats.dataset.schema import TRUNCATED, Schema
from fbuf._host.io.file import annotate_os_error, exists
from fbuf._host.types import StoreCorrupted

NAME = "dataset.json"


@dataclass(frozen=True)
class SegmentRows:
    """The rows of a segment that a data set uses.

    Attributes:
      number: The segment's.
      begin, stop: Rows `begin` to `stop - 1`; `stop` None: to its end.
      cut: Something else follows the last row, so its leaf `truncated` reads True.
    """

    number: int
    begin: int = 0
    stop: int | None = None
    cut: bool = False


@dataclass(frozen=True)
class SegmentEntry:
    """The same, as stored in the file."""

    number: int
    save: str
    begin: int
    stop: int
    cut: bool

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.stop - self.begin


@dataclass(frozen=True)
class Manifest:
    """The contents of a data set."""

    schema: Schema
    segments: tuple[SegmentEntry, ...]
    meta: dict[str, Any]

    @property
    def rows(self) -> int:
        """Return the number of rows of all segments."""
        return sum(segment.rows for segment in self.segments)

    @property
    def identity(self) -> str:
        """Return an id of these rows: equal for copies of the files, and for nothing else."""
        text = json.dumps(self.segment_lists())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def segment_lists(self) -> list[list[Any]]:
        """Return the segments as the file has them."""
        return [[s.number, s.save, s.begin, s.stop, s.cut] for s in self.segments]


def finish(
    path: Path, used: Sequence[SegmentRows], meta: dict[str, Any] | None = None, *, sync: bool = True, disk: Disk = DISK
) -> Manifest:
    """Write which segments make up the data set, in order; may be called again with others.

    Args:
      path: The data set's folder.
      used: The rows of each segment, each once, in the order of their rows.
      meta: JSON to save with them.
    Raises:
      ValueError: a segment is missing or repeated.
      StoreCorrupted: a segment is damaged. OSError: the disk is full, or fails; the previous file is intact.
    """
    base = directory.root(path)
    meta = {} if meta is None else meta
    check_meta(meta)
    if not used or len({part.number for part in used}) != len(used):
        raise ValueError(f"finish: segments are {[part.number for part in used]}; expected one or more, each once.")
    schema: Schema | None = None
    segments = []
    for part in used:
        try:
            with directory.open_segment(base, part.number) as saved:
                info = directory.info_of(saved)
        except checkpoint.CheckpointNotFound:
            raise ValueError(f"finish: segment {part.number} is not at {base}. Write and commit it.") from None
        schema = info.schema if schema is None else schema
        stop = info.rows if part.stop is None else part.stop
        segments.append(SegmentEntry(part.number, info.save, part.begin, stop, bool(part.cut)))
    assert schema is not None
    manifest = Manifest(schema, tuple(segments), meta)
    _publish(base, encode(manifest), sync, disk)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the file's text. Raises ValueError: it would be too large."""
    value = {
        "version": directory.VERSION,
        "schema": manifest.schema.to_json(),
        "pieces": manifest.segment_lists(),
        "meta": manifest.meta,
    }
    return checkpoint_manifest.encode_lines("finish", "data set", directory.VERSION, value)


def _publish(base: str, text: bytes, sync: bool, disk: Disk) -> None:
    new, unchanged = os.path.join(base, NAME + ".new"), "the previous file is unchanged"
    write_partial(disk, new, text, sync, unchanged)
    with annotate_os_error("rename", new, unchanged):
        disk.rename(new, os.path.join(base, NAME))
    if sync:
        sync_folder(disk, base)


def load(path: Path, disk: Disk = DISK) -> Manifest:
    """Return what `finish` wrote.

    Raises:
      FileNotFoundError: there is no data set, or it is unfinished.
      StoreCorrupted: the file is damaged. VersionError: a later release wrote it.
    """
    base = directory.root(path)
    where = os.path.join(base, NAME)
    if not exists(where):
        raise FileNotFoundError(errno.ENOENT, missing(base))
    text = read_plain(disk, where, checkpoint_manifest.MAX_BYTES)
    try:
        return decode(text)
    except checkpoint_manifest.VersionError as error:
        raise checkpoint_manifest.VersionError(f"fbuf.datasets: {where} {error}.") from None
    except checkpoint_manifest.INVALID as error:
        raise StoreCorrupted(f"{where} is damaged: {type(error).__name__}: {str(error)[:300]}. Restore it.") from None


def is_dataset(path: Path) -> bool:
    """Return whether a data set is at a path, finished or not, intact or not."""
    base = directory.root(path)
    return exists(os.path.join(base, NAME)) or any(
        directory.is_committed(base, number) for number in directory.numbers(base)
    )


def remove(path: Path) -> None:
    """Remove a data set: first its manifest, then its segments; other files stay. Raises OSError."""
    base = directory.root(path)
    for name in (NAME, NAME + ".new"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(base, name))
    for number in directory.numbers(base):
        directory.discard(base, number)
    for where in (os.path.join(base, directory.SEGMENTS), base):
        with contextlib.suppress(OSError):  # it holds other files
            os.rmdir(where)


def missing(base: str) -> str:
    """Return the error for a folder without a finished data set."""
    found = directory.numbers(base)
    if found:
        return (
            f"fbuf.datasets: the data set at {base} is not finished: {len(found)} segments are there, but no {NAME}. Run again "
            f"what was writing it; complete segments are kept."
        )
    return f"fbuf.datasets: there is no data set at {base}. Give the path of a folder with {NAME}."


def decode(text: bytes) -> Manifest:
    """Parse and check the untrusted text of a manifest. Raises VersionError and INVALID."""
    value = checkpoint_manifest.decode_lines("data set", directory.VERSION, text)
    if set(value) != {"version", "schema", "pieces", "meta"}:
        raise TypeError("it is not an object of version, schema, pieces and meta")
    if type(value["meta"]) is not dict or type(value["pieces"]) is not list:
        raise TypeError("its meta or pieces are invalid")
    schema = Schema.from_json(value["schema"])
    segments = tuple(_entry(entry) for entry in value["pieces"])
    if not segments or len({segment.number for segment in segments}) != len(segments):
        raise ValueError("it has no segments, or one twice")
    if any(segment.cut for segment in segments) and schema.texts.get(TRUNCATED) != "bool[]":
        raise ValueError(f"a segment is cut, and rows have no leaf '{TRUNCATED}'")
    return Manifest(schema, segments, value["meta"])


def _entry(entry: Any) -> SegmentEntry:
    if type(entry) is not list or [type(item) for item in entry] != [int, str, int, int, bool]:
        raise TypeError(f"{str(entry)[:80]} in place of a segment")
    number, save, begin, stop, cut = entry
    if not (0 <= number < directory.MAX_SEGMENTS and 0 <= begin < stop < 1 << 40):
        raise ValueError(f"{str(entry)[:80]} in place of a segment")
    return SegmentEntry(number, checkpoint_manifest.check_save_id(save), begin, stop, cut)
