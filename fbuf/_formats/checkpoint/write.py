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
import secrets
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fbuf._concurrency.parallel import BackgroundCall
from fbuf._core.progress import Bar, Progress
from fbuf._formats.checkpoint.data_file import DataFile, OpenFile, max_header_bytes
from fbuf._formats.checkpoint.directory import DAMAGED_SAVES, UNSYNCED_SAVES, Folder
from fbuf._formats.checkpoint.filesystem import DISK, SAVE_ELSEWHERE, Disk, Path, ReadError, data_name
from fbuf._formats.checkpoint.layout import Plan, plan
from fbuf._formats.checkpoint.manifest import MAX_DEPTH, ArrayEntry, FileEntry, Manifest, VersionError
from fbuf._host.io.checksum import crc32
from fbuf._host.io.file import annotate_os_error
from fbuf._host.memory.lazy_array import Source
from fbuf._host.types import Array, StoreCorrupted, flat

_STEP_BYTES = 1 << 19
"""Bytes of blocks that are read and compared at once."""
NEW = -1
"""The file number of blocks in the file that is being written."""


class PreviousSave:
    """The generation that a save builds on, and its open files; `files[i]` is None if unusable."""

    def __init__(self, folder: Folder) -> None:
        self.manifest: Manifest | None = None
        self.files: list[OpenFile | None] = []
        self._buffer = bytearray()
        for generation in folder.generations():
            try:
                manifest = folder.manifest(generation, known=True)
            except (StoreCorrupted, ReadError):
                continue
            if manifest.save not in DAMAGED_SAVES:
                self.manifest = manifest
                break
        if self.manifest is not None:
            for entry in self.manifest.files:
                try:
                    lost = entry.save in UNSYNCED_SAVES and not entry.synced
                    self.files.append(None if lost else OpenFile(folder.disk, folder.path, entry))
                except (StoreCorrupted, ReadError):
                    self.files.append(None)
                except BaseException:
                    self.close()
                    raise
        self.usable: Array = np.array([file is not None for file in self.files], bool)

    def buffer(self, size: int) -> bytearray:
        """Return memory for so many bytes or more; the next call returns the same."""
        if len(self._buffer) < size:
            self._buffer = bytearray(max(size, _STEP_BYTES))
        return self._buffer

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            if file is not None:
                file.close()


class PendingArray:
    """An array being saved: file, offset and checksum of each block; file `NEW` is the one being written."""

    def __init__(self, plan: Plan, last: PreviousSave) -> None:
        self.plan, count, self._last = plan, plan.layout.num_blocks, last
        self.file, self.offset, self.crc = np.full((3, count), NEW, np.int64)
        self.previous: Array = np.full(count, -1, np.int64)  # the last save's block of the same key, if usable
        self.entry = last.manifest.arrays.get(plan.name) if last.manifest else None
        if self.entry is None or not self.entry.layout.matches(plan.layout):
            return
        was, now = self.entry.layout, plan.layout
        if was.keys is None:
            self.previous[: was.num_blocks] = np.arange(was.num_blocks)[:count]
        else:
            place = {key: i for i, key in enumerate(was.keys)}
            self.previous[:] = [place.get(now.block_key(i), -1) for i in range(count)]
        found = self.previous >= 0
        j = self.previous[found]
        self.previous[found] = np.where((was.sizes[j] == now.sizes[found]) & last.usable[self.entry.file[j]], j, -1)
        assert last.manifest is not None
        compared = getattr(plan.source, "compared", None)
        if compared is not None and compared[0] == last.manifest.save:
            self.keep(np.flatnonzero(compared[1] & (self.previous >= 0)))
        marks, last_marks = plan.marks, self.entry.marks
        if marks is not None and last_marks is not None:
            previous = self.previous.tolist()
            same = [j >= 0 and marks[i] is not None and marks[i] == last_marks[j] for i, j in enumerate(previous)]
            self.keep(np.flatnonzero(same))

    def keep(self, which: Any) -> None:
        """Reuse blocks of the last save."""
        assert self.entry is not None
        j = self.previous[which]
        self.file[which], self.offset[which] = self.entry.file[j], self.entry.offset[j]
        self.crc[which] = self.entry.crc[j]

    def new_blocks(self) -> Iterator[tuple[int, memoryview]]:
        """Yield each block to write and its bytes; keep those whose bytes are on the disk."""
        sizes = self.plan.layout.sizes
        for start, stop in self._runs():
            data = flat(self.plan.read(start, stop))
            stored = self._stored(start, data.nbytes)
            # `startswith` is memcmp in place; `==` of memoryviews compares byte by byte
            if stored is not None and stored.startswith(data):
                self.keep(slice(start, stop))
                continue
            at = 0
            for i, size in enumerate(sizes[start:stop].tolist(), start):
                part, end = data[at : at + size], at + size
                if stored is not None and stop - start > 1 and stored.startswith(part, at):
                    self.keep(i)
                else:
                    yield i, part
                at = end

    def _runs(self) -> list[tuple[int, int]]:
        """Return the blocks to write or compare, in runs that are contiguous in the source and on the disk."""
        new = np.flatnonzero(self.file == NEW).tolist()
        if not self.plan.slices_are_views:
            return [(i, i + 1) for i in new]
        size, previous = int(self.plan.layout.sizes[:1].sum()), self.previous.tolist()
        most = max(_STEP_BYTES // max(size, 1), 1)
        file, offset = ([], []) if self.entry is None else (self.entry.file.tolist(), self.entry.offset.tolist())

        def run(block: tuple[int, int]) -> tuple[int, ...]:
            n, i = block
            j = previous[i]
            return (i - n, i // most, *(() if j < 0 else (file[j], offset[j] - i * size)))

        runs = [list(blocks) for _, blocks in itertools.groupby(enumerate(new), run)]
        return [(blocks[0][1], blocks[-1][1] + 1) for blocks in runs]

    def _stored(self, i: int, size: int) -> bytearray | None:
        """Return the bytes of the last save from block `i` on, `size` and any more; None if they are not there."""
        j = int(self.previous[i])
        if j < 0:
            return None
        assert self.entry is not None
        file, out = self._last.files[self.entry.file[j]], self._last.buffer(size)
        assert file is not None
        try:
            file.read(memoryview(out)[:size], int(self.entry.offset[j]))
        except (StoreCorrupted, ReadError):
            return None
        return out


MAX_FILES = 64


class SaveName(NamedTuple):
    """The id of a save, and the number of its files."""

    id: str
    number: int


class Save:
    """A save in progress."""

    def __init__(self, folder: Folder, previous: PreviousSave, plans: list[Plan], sync: bool, name: SaveName) -> None:
        self._folder, self._previous, self._sync = folder, previous, sync
        self._id, self._generation = name
        self._columns = [PendingArray(plan, previous) for plan in plans]
        self._data: DataFile | None = None
        self._header = self.written = 0

    def run(self, meta: dict[str, Any], progress: Progress) -> Manifest:
        """Write and publish. The manifest is written while the disk syncs the data file."""
        manifest = self._write_data(meta, progress)
        if self._data is None:
            before = self._previous.manifest
            named = before is not None and all(f.synced for f in before.files)
            self.written += self._folder.publish(manifest, self._sync, named)
            return manifest
        data = BackgroundCall(self._data.wait)
        try:
            self.written += self._folder.publish(manifest, self._sync, False, data)
        finally:
            data.join()
        return manifest

    def write(self, meta: dict[str, Any], progress: Progress) -> Manifest:
        """Write the data file, and sync it."""
        manifest = self._write_data(meta, progress)
        if self._data is not None:
            self._data.wait()
        return manifest

    def _write_data(self, meta: dict[str, Any], progress: Progress) -> Manifest:
        """Write the data file; `DataFile.wait` must follow."""
        total = sum(column.plan.layout.nbytes for column in self._columns)
        with contextlib.closing(Bar(progress, "fbuf.save", total)) as bar:
            return self._write_blocks(meta, bar)

    def _write_blocks(self, meta: dict[str, Any], bar: Bar) -> Manifest:
        self._header = self._max_header()
        for column in sorted(self._columns, key=lambda c: c.plan.marks is None):  # first what need not be compared
            left = column.plan.layout.nbytes
            for i, data in column.new_blocks():
                self._write(column, i, data)
                left -= data.nbytes
                bar(data.nbytes)
            bar(left)
        self._compact()
        files: list[FileEntry] = []
        if self._data is not None:
            files.append(self._data.finish())
            self.written += files[0].size
        return self._manifest(meta, files)

    def close(self) -> None:
        """Close the data file."""
        if self._data is not None:
            self._data.close()

    def rollback(self) -> None:
        """Remove what was written, and no file that was there."""
        self.close()
        self._folder.remove_generation(self._generation, data=self._data is not None)

    def _max_header(self) -> int:
        """Return an upper bound of the header's bytes: that of all blocks that may be written."""
        many = len(self._previous.files) >= MAX_FILES
        # The last is `NEW`.
        may = np.array([*(many or not self._is_half_live(f, live) for f, live in enumerate(self._live())), True])
        return sum(
            max_header_bytes(c.plan.name, c.plan.layout, np.flatnonzero(may[c.file]))
            for c in self._columns
            if len(c.file)
        )

    def _write(self, column: PendingArray, i: int, data: memoryview) -> None:
        if self._data is None:
            path = self._folder.file(data_name(self._generation))
            self._data = DataFile(self._folder.disk, path, self._header, self._id, self._sync)
        column.offset[i] = self._data.add(column.plan.name, column.plan.layout, i, data)
        column.file[i], column.crc[i] = NEW, crc32(data)

    def _blocks(self) -> tuple[Array, Array]:
        """Return the file and the bytes of every block, int64[blocks] each."""
        none: Array = np.zeros(0, np.int64)
        file = np.concatenate([none, *(column.file for column in self._columns)])
        return file, np.concatenate([none, *(column.plan.layout.sizes for column in self._columns)])

    def _live(self) -> list[int]:
        """Return the bytes in use of each old file."""
        file, sizes = self._blocks()
        return np.bincount(file + 1, sizes, len(self._previous.files) + 1)[1:].astype(np.int64).tolist()

    def _is_half_live(self, file: int, live: int) -> bool:
        assert self._previous.manifest is not None
        entry = self._previous.manifest.files[file]
        return 2 * live >= entry.size - entry.header

    def _compact(self) -> None:
        """Move blocks out of files that are mostly unused, and out of the smallest of too many."""
        live = self._live()
        used = [f for f, size in enumerate(live) if size]
        moved = {f for f in used if not self._is_half_live(f, live[f])}
        rest = sorted((f for f in used if f not in moved), key=lambda f: live[f])
        if len(rest) >= MAX_FILES:
            moved |= set(rest[: len(rest) - MAX_FILES // 2])
        for column in self._columns if moved else ():
            sizes = column.plan.layout.sizes
            for f in sorted(moved):
                for i in np.flatnonzero(column.file == f).tolist():
                    self._move(column, i, int(sizes[i]))

    def _move(self, column: PendingArray, i: int, size: int) -> None:
        file = self._previous.files[column.file[i]]
        assert file is not None
        data, at = memoryview(bytearray(size)), int(column.offset[i])
        is_read = whole = False
        try:
            file.read(data, at)
            is_read, whole = True, crc32(data) == column.crc[i]
        except StoreCorrupted:
            is_read = True
        except ReadError:
            pass
        if not whole:  # damaged on the disk: the source may have it still, and the next save compares with none
            assert self._previous.manifest is not None
            if is_read:
                DAMAGED_SAVES.add(self._previous.manifest.save)
            data = flat(column.plan.read(i, i + 1))
        self._write(column, i, data)

    def _sync_old_file(self, f: int) -> FileEntry:
        """Return an old file's entry; sync it if its save did not."""
        file, manifest = self._previous.files[f], self._previous.manifest
        assert file is not None and manifest is not None
        entry = manifest.files[f]
        if entry.synced or not self._sync:
            return entry
        try:
            with annotate_os_error("sync", file.path, SAVE_ELSEWHERE):
                self._folder.disk.fsync(file.fd)
        except OSError:
            UNSYNCED_SAVES.add(entry.save)
            raise
        return dataclasses.replace(entry, synced=True)

    def _manifest(self, meta: dict[str, Any], files: list[FileEntry]) -> Manifest:
        """Return the manifest, with files renumbered."""
        number: Array = np.zeros(len(self._previous.files) + 1, np.int64)  # the last is NEW's
        for f in np.unique(self._blocks()[0]).tolist():
            if f != NEW:
                number[f] = len(files)
                files = [*files, self._sync_old_file(f)]
        entries = {
            c.plan.name: ArrayEntry(c.plan.layout, number[c.file], c.offset, c.crc, c.plan.marks) for c in self._columns
        }
        return Manifest(self._generation, self._id, meta, files, entries)


class Written(NamedTuple):
    """The result of a save."""

    generation: int
    bytes_written: int  # to the disk, by this save
    bytes_total: int  # of all arrays


def write(
    path: Path,
    arrays: Mapping[str, Source],
    meta: dict[str, Any],
    *,
    keep: int = 2,
    sync: bool = True,
    progress: Progress = None,
    disk: Disk = DISK,
) -> Written:
    """Save arrays as the next generation of the checkpoint at `path`; the previous ones stay intact until then.

    Whenever the process is killed, the disk fills up or power fails, `read` finds the previous generation or this one.

    Args:
      path: A folder; created if missing.
      arrays: Sources by name.
      meta: JSON to save with them.
      keep: Number of generations to keep, this one included.
      sync: Wait for the disk. False: safe if the process is killed, not if power fails.
      progress: True for a bar, or a callable of (bytes done, bytes in all) after each block.
    Returns:
      The generation, bytes written, and bytes of all arrays.
    Raises:
      TypeError, ValueError: an array or `meta` cannot be saved. Nothing was written.
      BlockingIOError: another save to `path` is running.
      NotADirectoryError: `path` is a file. FileExistsError: it is the folder of a live store.
      VersionError: a later release has saved there.
      OSError: the disk is full, or fails. The previous generations are intact.
    Cost: each block with a new mark or none is read once, and compared with the bytes on the disk; new blocks are written once.
      Memory: two blocks, about 300 bytes per block, and two megabytes.
    """
    check_settings(meta, keep)
    plans, folder = plan(arrays), Folder(path, disk)
    folder.create(sync)
    with folder.locked():
        folder.remove_leftovers()
        with contextlib.closing(PreviousSave(folder)) as previous:
            save = Save(folder, previous, plans, sync, SaveName(secrets.token_hex(16), folder.next_number()))
            try:
                manifest = save.run(meta, progress)
            except BaseException:
                save.rollback()
                raise
        prune(folder, manifest, previous, keep)
    return Written(manifest.generation, save.written, sum(p.layout.nbytes for p in plans))


def check_settings(meta: Any, keep: Any) -> None:
    """Raise TypeError or ValueError for invalid arguments of a save."""
    if isinstance(keep, bool) or not hasattr(keep, "__index__") or keep < 1:
        raise ValueError(f"fbuf.save: keep is {keep!r}; expected an int, 1 or more.")
    check_meta(meta)


def prune(folder: Folder, manifest: Manifest, previous: PreviousSave, keep: int) -> None:
    """Remove older generations than the newest `keep`; warn if that fails."""
    try:
        folder.prune(manifest, None if None in previous.files else previous.manifest, keep)
    except (OSError, VersionError) as error:
        warnings.warn(f"{error} The checkpoint is saved; older ones were not removed.", RuntimeWarning, stacklevel=3)


def check_meta(meta: Any, where: str = "meta", depth: int = 2) -> None:
    """Raise TypeError or ValueError if a value is not JSON, or does not survive a round trip."""
    if depth > MAX_DEPTH:
        raise ValueError(f"fbuf.save: meta is nested more than {MAX_DEPTH} deep; expected less.")
    if isinstance(meta, dict):
        for key, value in meta.items():
            if type(key) is not str:
                raise TypeError(f"fbuf.save: {where} has the key {key!r}; expected text.")
            check_meta(value, f"{where}[{key!r}]", depth + 1)
    elif isinstance(meta, list | tuple):
        for i, value in enumerate(meta):
            check_meta(value, f"{where}[{i}]", depth + 1)
    elif type(meta) not in (str, int, float, bool, type(None)):
        raise TypeError(f"fbuf.save: {where} is {type(meta).__name__}; expected JSON.")
    elif isinstance(meta, float) and not math.isfinite(meta):
        raise ValueError(f"fbuf.save: {where} is {meta}; expected a finite number.")
