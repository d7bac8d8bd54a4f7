"""Find where each block of a save is: in an older file, if its mark or its bytes are unchanged, or in the new file."""

from __future__ import annotations

from typing import Any

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
        self.keep(np.flatnonzero(same))

    def keep(self, which: Any) -> None:
        """Reuse blocks of the last save."""
        assert self.entry is not None
        j = self.previous[which]
        self.file[which], self.offset[which] = self.entry.file[j], self.entry.offset[j]
        self.crc[which] = self.entry.crc[j]

    def previous_place(self, i: int) -> tuple[OpenFile, int] | None:
        """Return the file and offset of the bytes to compare block `i` with."""
        j = int(self.previous[i])
        if j < 0 or self.file[i] != NEW:
            return None
        assert self.entry is not None
        file = self._files[self.entry.file[j]]
        assert file is not None
        return file, int(self.entry.offset[j])

    def blocks_in(self, file: int) -> list[int]:
        """Return the blocks that are in an older file."""
        return np.flatnonzero(self.file == file).tolist()
