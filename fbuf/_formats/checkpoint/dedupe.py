"""Find where each block of a save is: in an older file, if its mark or its bytes are unchanged, or in the new file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fbuf._formats.checkpoint.data_file import OpenFile
from fbuf._formats.checkpoint.directory import DAMAGED_SAVES, UNSYNCED_SAVES, Folder
from fbuf._formats.checkpoint.layout import Plan
from fbuf._formats.checkpoint.manifest import Manifest
from fbuf._host.types import Array, StoreCorrupted

NEW = -1
"""The file number of blocks in the file that is being written."""


class PreviousSave:
    """The generation that a save builds on, and its open files; `files[i]` is None if unusable."""

    def __init__(self, folder: Folder) -> None:
        self.manifest: Manifest | None = None
        self.files: list[OpenFile | None] = []
        for generation in folder.generations():
            try:
                manifest = folder.manifest(generation, known=True)
            except StoreCorrupted:
                continue
            if manifest.save not in DAMAGED_SAVES:
                self.manifest = manifest
                break
        if self.manifest is not None:
            for entry in self.manifest.files:
                try:
                    lost = entry.save in UNSYNCED_SAVES and not entry.synced
                    self.files.append(None if lost else OpenFile(folder.disk, folder.path, entry))
                except StoreCorrupted:
                    self.files.append(None)
                except BaseException:
                    self.close()
                    raise

    @property
    def complete_manifest(self) -> Manifest | None:
        """The manifest, if all its files are usable."""
        return None if None in self.files else self.manifest

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            if file is not None:
                file.close()


class PendingArray:
    """An array being saved: file, offset and checksum of each block; file `NEW` is the one being written."""

    def __init__(self, plan: Plan, last: PreviousSave) -> None:
        self.plan, count, self._files = plan, plan.layout.num_blocks, last.files
        self.file, self.offset, self.crc = (np.full(count, NEW, np.int64) for _ in range(3))
        self.marks = [plan.mark(i) for i in range(count)]
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
        usable = np.array([file is not None for file in last.files], bool)
        there = self.previous >= 0
        j = self.previous[there]
        self.previous[there] = np.where((was.sizes[j] == now.sizes[there]) & usable[self.entry.file[j]], j, -1)
        if plan.marks is None or self.entry.marks is None:
            return
        marks, last_marks, previous = self.marks, self.entry.marks, self.previous.tolist()
        same = [j >= 0 and marks[i] is not None and marks[i] == last_marks[j] for i, j in enumerate(previous)]
        self._reuse(np.flatnonzero(same))

    def keep(self, start: int, stop: int) -> None:
        """Reuse blocks `start` to `stop` of the last save."""
        self._reuse(np.arange(start, stop))

    def _reuse(self, which: Array) -> None:
        assert self.entry is not None
        j = self.previous[which]
        self.file[which], self.offset[which], self.crc[which] = (
            self.entry.file[j],
            self.entry.offset[j],
            self.entry.crc[j],
        )

    def previous_place(self, i: int) -> tuple[OpenFile, int] | None:
        """Return the file and offset of the bytes to compare block `i` with."""
        j = int(self.previous[i])
        if j < 0 or self.file[i] != NEW:
            return None
        assert self.entry is not None
        file = self._files[self.entry.file[j]]
        assert file is not None
        return file, int(self.entry.offset[j])

    def runs(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of blocks handled together: reused, new, or compared with contiguous bytes.

        Runs of the last two kinds have at most `most` bytes, or one block.
        """
        count, sizes = len(self.file), self.plan.layout.sizes
        if count < 2:
            yield from ((0, 1),)[:count]
            return
        kind = np.where(self.file != NEW, 0, np.where(self.previous < 0, 1, 2))
        compared = np.flatnonzero(kind == 2)
        file, at = np.full(count, NEW, np.int64), np.zeros(count, np.int64)
        if len(compared):
            assert self.entry is not None
            j = self.previous[compared]
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

    def blocks_in(self, file: int) -> list[int]:
        """Return the blocks that are in an older file."""
        return np.flatnonzero(self.file == file).tolist()
