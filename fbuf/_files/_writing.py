"""A save: what is new goes to one new data file, what is old is named again.

Of each block it is known by its mark that it is as it was, or it is read and compared: first its checksum, and where that is
the same the very bytes in the older file. So a save that keeps an old block never relies on a checksum, and a block that has
been damaged on the disk is written again. Rejected: a cryptographic digest of every block (1 GB/s on one core, more than all
else that a save does; comparing takes a fifth of that, and a first save nothing).

Blocks of an older file move to the new one when less than half of it is still in use, and the smallest files are merged when
there are many. Both cost, over many saves, no more than was written.
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fbuf._files._data import DataFile, OpenFile, bytes_of, header_room
from fbuf._files._disk import DISK, INSTEAD, Disk
from fbuf._files._folder import Folder
from fbuf._files._manifest import ArrayEntry, FileEntry, Manifest, encode
from fbuf._files._names import data_name
from fbuf._files._progress import Bar, Progress
from fbuf._files._sources import Plan, Source, plan
from fbuf._host.arrays import Array, StoreCorrupted
from fbuf._host.files import telling

MOST_FILES = 64
_NEW = -1  # the place of blocks in the file that is being written
_PIECE = 1 << 20


class Written(NamedTuple):
    """What a save did."""

    generation: int
    bytes_written: int  # to the disk, by this save
    bytes_total: int  # of all arrays


class _Old:
    """The generation that a save builds on: its blocks, and the files that they lie in; `files[i]` None: not usable."""

    def __init__(self, folder: Folder) -> None:
        self.manifest: Manifest | None = None
        self.files: list[OpenFile | None] = []
        for generation in folder.generations():
            try:
                self.manifest = folder.manifest(generation)
                break
            except StoreCorrupted:
                continue
        if self.manifest is not None:
            for entry in self.manifest.files:
                try:
                    self.files.append(OpenFile(folder.disk, folder.path, entry))
                except StoreCorrupted:
                    self.files.append(None)
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        for file in self.files:
            if file is not None:
                file.close()


class _Column:
    """An array on its way: where its blocks lie, by the numbers of the old files; `_NEW`: in the new one."""

    def __init__(self, plan: Plan, old: _Old) -> None:
        self.plan, count = plan, plan.layout.count
        self.file, self.offset, self.crc = (np.full(count, _NEW, np.int64) for _ in range(3))
        self.marks = [plan.mark(i) for i in range(count)]
        self.before: Array = np.full(count, -1, np.int64)  # the old block of the same key, if it is usable
        self.entry = old.manifest.arrays.get(plan.name) if old.manifest else None
        if self.entry is None or not self.entry.layout.matches(plan.layout):
            return
        was, sizes, now = self.entry.layout, self.entry.layout.sizes(), plan.layout.sizes()
        place = None if was.keys is None else {key: i for i, key in enumerate(was.keys)}
        usable = [file is not None for file in old.files]
        for i in range(count):
            j = place.get(plan.layout.key(i), -1) if place is not None else i if i < was.count else -1
            if j >= 0 and sizes[j] == now[i] and usable[self.entry.file[j]]:
                self.before[i] = j
        for i in np.flatnonzero(self.before >= 0).tolist():
            j = int(self.before[i])
            if self.marks[i] is not None and self.entry.marks is not None and self.marks[i] == self.entry.marks[j]:
                self.keep(i, j)

    def keep(self, i: int, j: int) -> None:
        """Block `i` is block `j` of the last save."""
        assert self.entry is not None
        self.file[i], self.offset[i], self.crc[i] = self.entry.file[j], self.entry.offset[j], self.entry.crc[j]

    def kept(self, file: int) -> list[int]:
        """Blocks that lie in an old file."""
        return np.flatnonzero(self.file == file).tolist()


def write(
    path: str,
    arrays: Mapping[str, Source],
    meta: dict[str, Any],
    *,
    keep: int = 2,
    sync: bool = True,
    progress: Progress | bool | None = None,
    disk: Disk = DISK,
) -> Written:
    """Saves arrays as the next generation of the checkpoint at `path`; what is there stays as it is until that is done.

    Whatever happens, a process killed, a full disk, a failure of power, `read` finds the generation before or this one.

    Args:
      path: A folder; made if it is not there.
      arrays: Sources by name.
      meta: What else to keep, as JSON.
      keep: Generations that stay, this one included.
      sync: Wait for the disk. False: killed processes do no harm, a failure of power may.
      progress: True for a bar, or a callable that is given bytes done and bytes in all after each block.
    Returns:
      The number of the generation, bytes written, and bytes of all arrays.
    Raises:
      TypeError, ValueError: an array or `meta` cannot be saved. Nothing was written.
      BlockingIOError: another save to `path` is at work.
      FileExistsError: `path` is a file, or the folder of a live store.
      VersionError: a later release has saved there.
      OSError: the disk is full, or fails. What was there is as before.
    Cost: each block without a mark, or with a new one, is read once; what is new is written once. Memory: one block, some
      300 bytes for every block, and a megabyte.
    """
    if type(keep) is not int or keep < 1:
        raise ValueError(f"fbuf.save: keep is {keep}; expected 1 or more.")
    check_meta(meta)
    plans, folder = plan(arrays), Folder(path, disk)
    folder.make(sync)
    with folder.locked():
        folder.sweep()
        old = _Old(folder)
        try:
            save = _Save(folder, old, plans, sync)
            try:
                manifest = save.run(meta, progress)
            except BaseException:
                save.undo()
                raise
        finally:
            old.close()
        try:
            folder.prune(manifest, keep)
        except OSError as error:
            warnings.warn(f"{error} The checkpoint is saved.", RuntimeWarning, stacklevel=2)
    return Written(manifest.generation, save.written, sum(p.layout.nbytes for p in plans))


class _Save:
    """One save at work."""

    def __init__(self, folder: Folder, old: _Old, plans: list[Plan], sync: bool) -> None:
        self._folder, self._old, self._sync = folder, old, sync
        self._id, self._generation = secrets.token_hex(16), folder.next_number()
        self._columns = [_Column(plan, old) for plan in plans]
        self._data: DataFile | None = None
        self._buffer = memoryview(bytearray(_PIECE))
        self.written = 0

    def run(self, meta: dict[str, Any], progress: Progress | bool | None) -> Manifest:
        """Writes and publishes."""
        bar = Bar(progress, "fbuf.save", sum(column.plan.layout.nbytes for column in self._columns))
        room = self._room()
        for column in self._columns:
            sizes = column.plan.layout.sizes()
            for i in range(column.plan.layout.count):
                if column.file[i] == _NEW:
                    self._block(column, i, room)
                bar(int(sizes[i]))
        self._compact(room)
        files: list[FileEntry] = []
        if self._data is not None:
            files.append(self._data.finish(self._sync))
            self.written += files[0].size
        manifest = self._manifest(meta, files)
        text = encode(manifest)
        self._folder.publish(self._generation, text, self._sync)
        self.written += len(text)
        bar.close()
        return manifest

    def undo(self) -> None:
        """Removes what was written."""
        if self._data is not None:
            self._data.close()
        self._folder.withdraw(self._generation)

    def _room(self) -> int:
        """Bytes of the header if all blocks are written that may be."""
        few = {f for f, live in enumerate(self._live()) if not self._stays(f, live)} | {_NEW}
        return sum(
            header_room(c.plan.name, c.plan.layout, i) + 2
            for c in self._columns
            for i in range(len(c.file))
            if int(c.file[i]) in few or len(self._old.files) >= MOST_FILES
        )

    def _block(self, column: _Column, i: int, room: int) -> None:
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

    def _write(self, column: _Column, i: int, data: memoryview, crc: int, room: int) -> None:
        if self._data is None:
            path = self._folder.file(data_name(self._generation))
            self._data = DataFile(self._folder.disk, path, room, self._id)
        column.offset[i] = self._data.add(column.plan.name, column.plan.layout, i, data)
        column.file[i], column.crc[i] = _NEW, crc

    def _live(self) -> list[int]:
        """Bytes in use of each old file."""
        live = np.zeros(len(self._old.files), np.int64)
        for column in self._columns:
            kept = column.file >= 0
            np.add.at(live, column.file[kept], column.plan.layout.sizes()[kept])
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
            sizes = column.plan.layout.sizes()
            for f in sorted(moved):
                for i in column.kept(f):
                    self._move(column, i, int(sizes[i]), room)

    def _move(self, column: _Column, i: int, size: int, room: int) -> None:
        file = self._old.files[column.file[i]]
        assert file is not None
        data, at = memoryview(bytearray(size)), int(column.offset[i])
        try:
            file.read(data, at)
            crc = zlib.crc32(data)
        except StoreCorrupted:
            crc = _NEW
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
        number[_NEW] = 0
        entries = {
            c.plan.name: ArrayEntry(
                c.plan.layout, number[c.file], c.offset, c.crc, None if c.plan.marks is None else c.marks
            )
            for c in self._columns
        }
        return Manifest(self._generation, self._id, meta, files, entries)


def check_meta(meta: Any, where: str = "meta") -> None:
    """Raises TypeError if that is not JSON, or would not come back as it is."""
    if isinstance(meta, dict):
        for key, value in meta.items():
            if type(key) is not str:
                raise TypeError(f"fbuf.save: {where} has the key {key!r}; expected text.")
            check_meta(value, f"{where}[{key!r}]")
    elif isinstance(meta, list | tuple):
        for i, value in enumerate(meta):
            check_meta(value, f"{where}[{i}]")
    elif type(meta) not in (str, int, float, bool, type(None)):
        raise TypeError(f"fbuf.save: {where} is {type(meta).__name__}; expected what JSON can say.")
