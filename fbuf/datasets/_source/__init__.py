"""Where the files of a data set come from, and their arrays as streams. The standard library and numpy only.

    source = connect("https://mirror.example/atari")  # None: the public bucket; a folder, file://, gs://, fsspec's
    entries = source.files("dqn/Pong/1/replay_logs/")  # name, size, md5, crc32c, generation; names are checked
    with rows(source, entries[0], item=(84, 84), dtype="uint8") as frames:  # parsed while it arrives; no disk
        for block in frames.blocks(1000):  # uint8[n, 84, 84]
            ...
    fetch(source, entries[0], path, progress=print)  # or to the disk first, resumable
    with rows_of(path, dtype="int32") as actions:
        whole = actions.array()

Everything here is a value or a stream; sources, entries and errors cross processes. Where to look:

* An address: `_connect` makes a source of it: `_bucket`, `_mirror`, `_folder` or `_fsspec`, with what `_entry` says.
* A listing: `_page` reads it, `_names` checks its names.
* Bytes over HTTP: `_web` is one request, `_webstream` one file in as many as it takes, `_retry` when to ask again.
* Bytes on their way: `_passing` counts and hashes them (`_digest`), `_fetch` puts them on the disk (`_space`: is there room).
* What they mean: `_gunzip` unpacks, `_header` reads what an array is, `_npystream` its rows.
* What goes wrong: `_errors`.
"""

from __future__ import annotations

import os
from typing import Any

from fbuf.datasets._source._bucket import ATARI, PUBLIC, Bucket
from fbuf.datasets._source._connect import connect
from fbuf.datasets._source._entry import Entry, Progress, Source
from fbuf.datasets._source._errors import FileCorrupted, SourceChanged, SourceError, SpaceError
from fbuf.datasets._source._fetch import fetch
from fbuf.datasets._source._folder import FileStream, Folder
from fbuf.datasets._source._fsspec import Fsspec
from fbuf.datasets._source._mirror import Mirror
from fbuf.datasets._source._names import check_name, inside
from fbuf.datasets._source._npystream import NpyStream
from fbuf.datasets._source._passing import Passing
from fbuf.datasets._source._retry import Retry
from fbuf.datasets._source._space import check_space, missing, size_text

__all__ = [
    "ATARI",
    "PUBLIC",
    "Bucket",
    "Entry",
    "FileCorrupted",
    "Folder",
    "Fsspec",
    "Mirror",
    "NpyStream",
    "Passing",
    "Progress",
    "Retry",
    "Source",
    "SourceChanged",
    "SourceError",
    "SpaceError",
    "check_name",
    "check_space",
    "connect",
    "fetch",
    "inside",
    "missing",
    "rows",
    "rows_of",
    "size_text",
]


def rows(source: Source, entry: Entry, *, progress: Progress | None = None, **expected: Any) -> NpyStream:
    """The array of a file, parsed while it arrives.

    Args:
      progress: Called with bytes that arrived and bytes in all.
      expected: What it must be: see `NpyStream`.
    Raises:
      SourceError, FileCorrupted: now for what the header says, later from `read` for the rest.
    """
    return NpyStream(Passing(source, entry, progress), entry.name, **expected)


def rows_of(path: str | os.PathLike[str], **expected: Any) -> NpyStream:
    """The array of a file on the disk. Raises SourceError, FileCorrupted."""
    return NpyStream(FileStream(os.fspath(path)), os.fspath(path), **expected)
