"""Where each block of a save lies: in an older file, where its mark or its bytes are as they were, or in the new one."""

from __future__ import annotations

import numpy as np

from fbuf._files._data import OpenFile
from fbuf._files._folder import DAMAGED, Folder
from fbuf._files._manifest import Manifest
from fbuf._files._sources import Plan
from fbuf._host.arrays import Array, StoreCorrupted

NEW = -1
"""The place of blocks in the file that is being written."""


class Old:
    """The generation that a save builds on: its blocks, and the files that they lie in; `files[i]` None: not usable."""

    def __init__(self, folder: Folder) -> None:
        self.manifest: Manifest | None = None
        self.files: list[OpenFile | None] = []
        for generation in folder.generations():
            try:
                manifest = folder.manifest(generation)
            except StoreCorrupted:
                continue
            if manifest.save not in DAMAGED:
                self.manifest = manifest
                break
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
        """Closes the files."""
        for file in self.files:
            if file is not None:
                file.close()


class Column:
    """An array on its way: where its blocks lie, by the numbers of the old files; `NEW`: in the new one."""

    def __init__(self, plan: Plan, old: Old) -> None:
        self.plan, count = plan, plan.layout.count
        self.file, self.offset, self.crc = (np.full(count, NEW, np.int64) for _ in range(3))
        self.marks = [plan.mark(i) for i in range(count)]
        self.before: Array = np.full(count, -1, np.int64)  # the old block of the same key, if it is usable
        self.entry = old.manifest.arrays.get(plan.name) if old.manifest else None
        if self.entry is None or not self.entry.layout.matches(plan.layout):
            return
        was, sizes, now = self.entry.layout, self.entry.layout.sizes, plan.layout.sizes
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
