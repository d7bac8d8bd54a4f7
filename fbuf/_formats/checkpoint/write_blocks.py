"""One save at work: blocks that are new to a new data file, others moved to it where too little of their file is in use.

Of each block it is known by its mark that it is as it was, or it is read and compared with the very bytes in the older file,
many blocks at a time. So a save that keeps an unmarked block never relies on a checksum, and one that has been damaged on the
disk is written again. Rejected: a cryptographic digest of every block (1 GB/s on one core, more than all else that a save does;
comparing takes a tenth of that, and a first save nothing); checksums before bytes are compared (most blocks are the same: then
both are needed, and the checksum takes longer); checksums in a second thread while the first writes (a loss where the cores
are busy).

Blocks of an older file move to the new one when less than half of it is still in use, and the smallest files are merged when
there are many. Both cost, over many saves, no more than was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fbuf._concurrency.parallel import BackgroundTask
from fbuf._core.progress import Bar, Progress
from fbuf._formats.checkpoint.data_file import DataFile, OpenFile, bytes_of, header_room, same
from fbuf._formats.checkpoint.dedupe import NEW, Column, Old
from fbuf._formats.checkpoint.directory import LOST, Folder
from fbuf._formats.checkpoint.filesystem import INSTEAD
from fbuf._formats.checkpoint.manifest import ArrayEntry, FileEntry, Manifest, encode
from fbuf._formats.checkpoint.names import data_name
from fbuf._formats.checkpoint.sources import Plan
from fbuf._host.io.file import annotate_os_error
from fbuf._host.types import Array, StoreCorrupted

MOST_FILES = 64
_PIECE = 1 << 19
"""Bytes that are compared, and written, at once."""


class Save:
    """One save at work."""

    def __init__(self, folder: Folder, old: Old, plans: list[Plan], sync: bool) -> None:
        self._folder, self._old, self._sync = folder, old, sync
        self._id, self._generation = secrets.token_hex(16), folder.next_number()
        self._columns = [Column(plan, old) for plan in plans]
        self._data: DataFile | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self._beside = BackgroundTask("fbuf-save")
        self.written = 0

    def run(self, meta: dict[str, Any], progress: Progress) -> Manifest:
        """Writes and publishes."""
        total = sum(column.plan.layout.nbytes for column in self._columns)
        with contextlib.closing(Bar(progress, "fbuf.save", total)) as bar, self._beside:
            return self._run(meta, bar)

    def _run(self, meta: dict[str, Any], bar: Bar) -> Manifest:
        room = self._room()
        for column in self._columns:
            sizes = column.plan.layout.sizes.tolist()
            for start, stop in column.runs(_PIECE):
                self._blocks(column, start, stop, room)
                for size in sizes[start:stop]:
                    bar(size)
        self._compact(room)
        files: list[FileEntry] = []
        waiting: Callable[[], None] | None = None
        if self._data is not None:
            files.append(self._data.finish())
            self.written += files[0].size
            waiting = self._beside.submit(self._data.wait)
        manifest = self._manifest(meta, files)
        text = encode(manifest)
        self._folder.remember(text, manifest)
        before = self._old.manifest
        named = self._data is None and before is not None and all(f.synced for f in before.files)
        self._folder.publish(self._generation, text, self._sync, named, waiting)
        self.written += len(text)
        return manifest

    def undo(self) -> None:
        """Removes what was written."""
        if self._data is not None:
            self._data.close()
        self._folder.withdraw(self._generation)

    def _room(self) -> int:
        """Bytes of the header if all blocks are written that may be."""
        many = len(self._old.files) >= MOST_FILES
        may = np.array(
            [*(many or not self._stays(f, live) for f, live in enumerate(self._live())), True]
        )  # NEW: the last
        return sum(
            header_room(c.plan.name, c.plan.layout, np.flatnonzero(may[c.file])) for c in self._columns if len(c.file)
        )

    def _blocks(self, column: Column, start: int, stop: int, room: int) -> None:
        """Blocks of one run: what is as it was is kept, and the rest is written."""
        if column.file[start] != NEW:
            return
        found = column.older(start)
        was = None if found is None else self._was(*found, int(column.plan.layout.sizes[start:stop].sum()))
        step = stop - start if column.plan.near else 1  # blocks that are read at once
        first = 0
        for i in range(start, stop, step):
            data = bytes_of(column.plan.read(i, i + step))
            there = None if was is None else was[first : first + data.nbytes]
            if found is None:
                self._write(column, i, i + step, data, room)
            elif there is not None and same(there, data):
                column.keep(i, i + step)
            elif there is not None and step == 1:
                self._write(column, i, i + 1, data, room)
            else:
                self._compare(column, i, i + step, data, there, room)
            first += data.nbytes

    def _compare(
        self, column: Column, start: int, stop: int, data: memoryview, was: memoryview | None, room: int
    ) -> None:
        """Blocks one by one; those that are not as they were are written, as many at once as follow one another."""
        found = column.older(start)
        assert found is not None
        file, at = found
        spare = memoryview(bytearray(_PIECE)) if was is None else was
        sizes = [*column.plan.layout.sizes[start:stop].tolist(), 0]
        begin, first = start, 0  # of the blocks that are to be written, and their bytes
        end = 0
        for i, size in enumerate(sizes, start):
            part = data[end : end + size]
            kept = i == stop or (
                file.holds(part, at + end, spare) if was is None else same(was[end : end + size], part)
            )
            if kept:
                if begin < i:
                    self._write(column, begin, i, data[first:end], room)
                if i < stop:
                    column.keep(i, i + 1)
                begin, first = i + 1, end + size
            end += size

    def _was(self, file: OpenFile, at: int, size: int) -> memoryview | None:
        """What lies in an older file, if it is not too much at once."""
        if size > _PIECE:
            return None
        try:
            file.read(self._buffer[:size], at)
        except StoreCorrupted:  # perhaps not all of it
            return None
        return self._buffer[:size]

    def _write(self, column: Column, start: int, stop: int, data: memoryview, room: int) -> None:
        """Writes blocks that lie one after another."""
        if self._data is None:
            path = self._folder.file(data_name(self._generation))
            self._data = DataFile(self._folder.disk, path, room, self._id, self._sync)
        ends = [0, *np.cumsum(column.plan.layout.sizes[start:stop]).tolist()]
        column.crc[start:stop] = [zlib.crc32(data[a:b]) for a, b in itertools.pairwise(ends)]
        column.offset[start:stop] = self._data.add(column.plan.name, column.plan.layout, start, stop, data)
        column.file[start:stop] = NEW

    def _live(self) -> list[int]:
        """Bytes in use of each old file."""
        live = np.zeros(len(self._old.files), np.int64)
        for column in self._columns:
            kept = column.file >= 0
            if len(live):
                live += np.bincount(column.file[kept], column.plan.layout.sizes[kept], len(live)).astype(np.int64)
        return live.tolist()

    def _stays(self, file: int, live: int) -> bool:
        assert self._old.manifest is not None
        entry = self._old.manifest.files[file]
        return 2 * live >= entry.size - entry.header

    def _compact(self, room: int) -> None:
        """Moves blocks out of files that are mostly dead, and out of the smallest of too many."""
        live = self._live()
        used = [f for f, size in enumerate(live) if size]
        moved = {f for f in used if not self._stays(f, live[f])}
        rest = sorted((f for f in used if f not in moved), key=lambda f: live[f])
        if len(rest) >= MOST_FILES:
            moved |= set(rest[: len(rest) - MOST_FILES // 2])
        for column in self._columns if moved else ():
            sizes = column.plan.layout.sizes
            for f in sorted(moved):
                for i in column.kept(f):
                    self._move(column, i, int(sizes[i]), room)

    def _move(self, column: Column, i: int, size: int, room: int) -> None:
        file = self._old.files[column.file[i]]
        assert file is not None
        data, at = memoryview(bytearray(size)), int(column.offset[i])
        try:
            file.read(data, at)
            whole = zlib.crc32(data) == column.crc[i]
        except StoreCorrupted:
            whole = False
        if not whole:  # damaged on the disk: the source has it still
            data = bytes_of(column.plan.read(i, i + 1))
        self._write(column, i, i + 1, data, room)

    def _synced(self, f: int) -> FileEntry:
        """An old file's entry; what a save that did not wait for the disk has written is waited for now."""
        file, manifest = self._old.files[f], self._old.manifest
        assert file is not None and manifest is not None
        entry = manifest.files[f]
        if entry.synced or not self._sync:
            return entry
        try:
            with annotate_os_error("sync", file.path, INSTEAD):
                self._folder.disk.fsync(file.fd)
        except OSError:
            LOST.add(entry.save)
            raise
        return dataclasses.replace(entry, synced=True)

    def _manifest(self, meta: dict[str, Any], files: list[FileEntry]) -> Manifest:
        """All of it, files numbered anew."""
        live = self._live()
        number: Array = np.full(len(live) + 1, 0, np.int64)
        for f in range(len(live)):
            if any((column.file == f).any() for column in self._columns):
                number[f] = len(files)
                files = [*files, self._synced(f)]
        number[NEW] = 0
        entries = {
            c.plan.name: ArrayEntry(
                c.plan.layout, number[c.file], c.offset, c.crc, None if c.plan.marks is None else c.marks
            )
            for c in self._columns
        }
        return Manifest(self._generation, self._id, meta, files, entries)
