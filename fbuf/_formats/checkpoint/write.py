"""Write the next generation of a checkpoint.

New and changed blocks go to one new data file; unchanged blocks stay in older files. A block is unchanged if its mark is, or
if its bytes equal those on the disk. Blocks move out of a file when less than half of it is in use, and the smallest files
are merged when there are many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import secrets
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fbuf._concurrency.background_task import Beside
from fbuf._core.progress import Bar, Progress
from fbuf._formats.checkpoint.data_file import DataFile, OpenFile, bytes_of, header_room, same
from fbuf._formats.checkpoint.dedupe import NEW, Column, Old
from fbuf._formats.checkpoint.directory import LOST, Folder
from fbuf._formats.checkpoint.errors import VersionError
from fbuf._formats.checkpoint.filesystem import DISK, INSTEAD, Disk, data_name
from fbuf._formats.checkpoint.layout import Plan, Source, plan
from fbuf._formats.checkpoint.manifest import MOST_DEPTH, ArrayEntry, FileEntry, Manifest, encode
from fbuf._host.io.file import telling
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
        self._beside = Beside("fbuf-save")
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
            with telling("sync", file.path, INSTEAD):
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


class Written(NamedTuple):
    """What a save did."""

    generation: int
    bytes_written: int  # to the disk, by this save
    bytes_total: int  # of all arrays


def write(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Source],
    meta: dict[str, Any],
    *,
    keep: int = 2,
    sync: bool = True,
    progress: Progress = None,
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
      NotADirectoryError: `path` is a file. FileExistsError: it is the folder of a live store.
      VersionError: a later release has saved there.
      OSError: the disk is full, or fails. What was there is as before.
    Cost: each block without a mark, or with a new one, is read once, and compared with what lies in the folder; what is new
      is written once. Memory: one block, some 300 bytes for every block, and a megabyte.
    """
    if isinstance(keep, bool) or not hasattr(keep, "__index__") or keep < 1:
        raise ValueError(f"fbuf.save: keep is {keep!r}; expected an int, 1 or more.")
    check_meta(meta)
    plans, folder = plan(arrays), Folder(path, disk)
    folder.make(sync)
    with folder.locked():
        folder.sweep()
        old = Old(folder)
        try:
            save = Save(folder, old, plans, sync)
            try:
                manifest = save.run(meta, progress)
            except BaseException:
                save.undo()
                raise
        finally:
            old.close()
        try:
            folder.prune(manifest, old.whole, keep)
        except (OSError, VersionError) as error:
            warnings.warn(
                f"{error} The checkpoint is saved; older ones were not removed.", RuntimeWarning, stacklevel=2
            )
    return Written(manifest.generation, save.written, sum(p.layout.nbytes for p in plans))


def check_meta(meta: Any, where: str = "meta", depth: int = 2) -> None:
    """Raises TypeError or ValueError if that is not JSON, or would not come back as it is."""
    if depth > MOST_DEPTH:
        raise ValueError(f"fbuf.save: meta is nested more than {MOST_DEPTH} deep; expected less.")
    if isinstance(meta, dict):
        for key, value in meta.items():
            if type(key) is not str:
                raise TypeError(f"fbuf.save: {where} has the key {key!r}; expected text.")
            check_meta(value, f"{where}[{key!r}]", depth + 1)
    elif isinstance(meta, list | tuple):
        for i, value in enumerate(meta):
            check_meta(value, f"{where}[{i}]", depth + 1)
    elif type(meta) not in (str, int, float, bool, type(None)):
        raise TypeError(f"fbuf.save: {where} is {type(meta).__name__}; expected what JSON can say.")
    elif isinstance(meta, float) and not math.isfinite(meta):
        raise ValueError(f"fbuf.save: {where} is {meta}; expected a number that JSON can say.")
