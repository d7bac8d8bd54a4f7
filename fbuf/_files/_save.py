"""One save at work: blocks that are new to a new data file, others moved to it where too little of their file is in use.

Of each block it is known by its mark that it is as it was, or it is read and compared: first its checksum, and where that is
the same the very bytes in the older file. So a save that keeps an unmarked block never relies on a checksum, and one that has
been damaged on the disk is written again. Rejected: a cryptographic digest of every block (1 GB/s on one core, more than all
else that a save does; comparing takes a fifth of that, and a first save nothing).

Blocks of an older file move to the new one when less than half of it is still in use, and the smallest files are merged when
there are many. Both cost, over many saves, no more than was written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import zlib
from typing import Any

import numpy as np

from fbuf._files._columns import NEW, Column, Old
from fbuf._files._data import DataFile, bytes_of, header_room
from fbuf._files._disk import INSTEAD
from fbuf._files._folder import Folder
from fbuf._files._manifest import ArrayEntry, FileEntry, Manifest, encode
from fbuf._files._names import data_name
from fbuf._files._progress import Bar, Progress
from fbuf._files._sources import Plan
from fbuf._host.arrays import Array, StoreCorrupted
from fbuf._host.files import telling

MOST_FILES = 64
_PIECE = 1 << 20


class Save:
    """One save at work."""

    def __init__(self, folder: Folder, old: Old, plans: list[Plan], sync: bool) -> None:
        self._folder, self._old, self._sync = folder, old, sync
        self._id, self._generation = secrets.token_hex(16), folder.next_number()
        self._columns = [Column(plan, old) for plan in plans]
        self._data: DataFile | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self.written = 0

    def run(self, meta: dict[str, Any], progress: Progress | bool | None) -> Manifest:
        """Writes and publishes."""
        total = sum(column.plan.layout.nbytes for column in self._columns)
        with contextlib.closing(Bar(progress, "fbuf.save", total)) as bar:
            return self._run(meta, bar)

    def _run(self, meta: dict[str, Any], bar: Bar) -> Manifest:
        room = self._room()
        for column in self._columns:
            sizes = column.plan.layout.sizes
            for i in range(column.plan.layout.count):
                if column.file[i] == NEW:
                    self._block(column, i, room)
                bar(int(sizes[i]))
        self._compact(room)
        files: list[FileEntry] = []
        if self._data is not None:
            files.append(self._data.finish())
            self.written += files[0].size
        manifest = self._manifest(meta, files)
        text = encode(manifest)
        before = self._old.manifest
        named = self._data is None and before is not None and all(f.synced for f in before.files)
        self._folder.publish(self._generation, text, self._sync, named)
        self.written += len(text)
        return manifest

    def undo(self) -> None:
        """Removes what was written."""
        if self._data is not None:
            self._data.close()
        self._folder.withdraw(self._generation)

    def _room(self) -> int:
        """Bytes of the header if all blocks are written that may be."""
        few = {f for f, live in enumerate(self._live()) if not self._stays(f, live)} | {NEW}
        return sum(
            header_room(c.plan.name, c.plan.layout, i) + 2
            for c in self._columns
            for i in range(len(c.file))
            if int(c.file[i]) in few or len(self._old.files) >= MOST_FILES
        )

    def _block(self, column: Column, i: int, room: int) -> None:
        """Reads a block; keeps the old one if it is the same, and writes it otherwise."""
        block = column.plan.read(i)
        data = bytes_of(block)
        crc, j = zlib.crc32(data), int(column.before[i])
        if j >= 0:
            assert column.entry is not None
            file = self._old.files[column.entry.file[j]]
            if crc == column.entry.crc[j] and file and file.holds(data, int(column.entry.offset[j]), self._buffer):
                column.keep(i, j)
                return
        self._write(column, i, data, crc, room)

    def _write(self, column: Column, i: int, data: memoryview, crc: int, room: int) -> None:
        if self._data is None:
            path = self._folder.file(data_name(self._generation))
            self._data = DataFile(self._folder.disk, path, room, self._id, self._sync)
        column.offset[i] = self._data.add(column.plan.name, column.plan.layout, i, data)
        column.file[i], column.crc[i] = NEW, crc

    def _live(self) -> list[int]:
        """Bytes in use of each old file."""
        live = np.zeros(len(self._old.files), np.int64)
        for column in self._columns:
            kept = column.file >= 0
            np.add.at(live, column.file[kept], column.plan.layout.sizes[kept])
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
        for column in self._columns:
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
            crc = zlib.crc32(data)
        except StoreCorrupted:
            crc = NEW
        if crc != column.crc[i]:  # damaged on the disk: the source has it still
            data = bytes_of(column.plan.read(i))
            crc = zlib.crc32(data)
        self._write(column, i, data, crc, room)

    def _synced(self, f: int) -> FileEntry:
        """An old file's entry; what a save that did not wait for the disk has written is waited for now."""
        file, manifest = self._old.files[f], self._old.manifest
        assert file is not None and manifest is not None
        entry = manifest.files[f]
        if entry.synced or not self._sync:
            return entry
        with telling("sync", file.path, INSTEAD):
            self._folder.disk.fsync(file.fd)
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
