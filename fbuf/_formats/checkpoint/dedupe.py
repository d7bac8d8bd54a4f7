"""Where each block of a save lies: in an older file, where its mark or its bytes are as they were, or in the new one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.directory import DAMAGED, LOST, Folder
from fbuf._formats.checkpoint.layout import Plan
from fbuf._formats.checkpoint.manifest import Manifest
from fbuf._host.types import Array, StoreCorrupted

NEW = -1
"""The place of blocks in the file that is being written."""


class Old:
    """The generation that a save builds on: its blocks, and the files that they lie in; `files[i]` None: not usable."""

    def __init__(self, folder: Folder) -> None:
        self.manifest: Manifest | None = None
        self.files: list[OpenFile | None] = []
        for generation in folder.generations():
            try:
                manifest = folder.manifest(generation, known=True)
            except StoreCorrupted:
                continue
            if manifest.save not in DAMAGED:
                self.manifest = manifest
                break
        if self.manifest is not None:
            for entry in self.manifest.files:
                try:
                    lost = entry.save in LOST and not entry.synced
                    self.files.append(None if lost else OpenFile(folder.disk, folder.path, entry))
                except StoreCorrupted:
                    self.files.append(None)
                except BaseException:
                    self.close()
                    raise

    @property
    def whole(self) -> Manifest | None:
        """The generation, if all its files are usable."""
        return None if None in self.files else self.manifest

    def close(self) -> None:
        """Closes the files."""
        for file in self.files:
            if file is not None:
                file.close()


class Column:
    """An array on its way: where its blocks lie, by the numbers of the old files; `NEW`: in the new one."""

    def __init__(self, plan: Plan, old: Old) -> None:
        self.plan, count, self._files = plan, plan.layout.count, old.files
        self.file, self.offset, self.crc = (np.full(count, NEW, np.int64) for _ in range(3))
        self.marks = [plan.mark(i) for i in range(count)]
        self.before: Array = np.full(count, -1, np.int64)  # the old block of the same key, if it is usable
        self.entry = old.manifest.arrays.get(plan.name) if old.manifest else None
        if self.entry is None or not self.entry.layout.matches(plan.layout):
            return
        was, now = self.entry.layout, plan.layout
        if was.keys is None:
            self.before[: was.count] = np.arange(was.count)[:count]
        else:
            place = {key: i for i, key in enumerate(was.keys)}
            self.before[:] = [place.get(now.key(i), -1) for i in range(count)]
        usable = np.array([file is not None for file in old.files], bool)
        there = self.before >= 0
        j = self.before[there]
        self.before[there] = np.where((was.sizes[j] == now.sizes[there]) & usable[self.entry.file[j]], j, -1)
        if plan.marks is None or self.entry.marks is None:
            return
        marks, old_marks, before = self.marks, self.entry.marks, self.before.tolist()
        same = [j >= 0 and marks[i] is not None and marks[i] == old_marks[j] for i, j in enumerate(before)]
        self._take(np.flatnonzero(same))

    def keep(self, start: int, stop: int) -> None:
        """Blocks `start` to `stop` are those of the last save."""
        self._take(np.arange(start, stop))

    def _take(self, which: Array) -> None:
        assert self.entry is not None
        j = self.before[which]
        self.file[which], self.offset[which], self.crc[which] = (
            self.entry.file[j],
            self.entry.offset[j],
            self.entry.crc[j],
        )

    def older(self, i: int) -> tuple[OpenFile, int] | None:
        """The file and the place of the bytes that block `i` is to be compared with."""
        j = int(self.before[i])
        if j < 0 or self.file[i] != NEW:
            return None
        assert self.entry is not None
        file = self._files[self.entry.file[j]]
        assert file is not None
        return file, int(self.entry.offset[j])

    def runs(self, most: int) -> Iterator[tuple[int, int]]:
        """First and end of blocks that fare alike: kept; or of `most` bytes at a time, but for single blocks, new, or to be
        compared with bytes that lie in one piece."""
        count, sizes = len(self.file), self.plan.layout.sizes
        if count < 2:
            yield from ((0, 1),)[:count]
            return
        kind = np.where(self.file != NEW, 0, np.where(self.before < 0, 1, 2))
        compared = np.flatnonzero(kind == 2)
        file, at = np.full(count, NEW, np.int64), np.zeros(count, np.int64)
        if len(compared):
            assert self.entry is not None
            j = self.before[compared]
            file[compared], at[compared] = self.entry.file[j], self.entry.offset[j] - np.cumsum(sizes)[compared]
        breaks = (np.diff(kind) != 0) | (np.diff(file) != 0) | (np.diff(at) != 0)
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist(), count]
        for start, stop in zip(starts, starts[1:], strict=False):
            if not kind[start]:
                yield start, stop
                continue
            total = 0
            for i, size in enumerate(sizes[start:stop].tolist(), start):
                if total and total + size > most:
                    yield start, i
                    start, total = i, 0
                total += size
            yield start, stop

    def kept(self, file: int) -> list[int]:
        """Blocks that lie in an old file."""
        return np.flatnonzero(self.file == file).tolist()
