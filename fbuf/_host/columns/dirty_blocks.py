"""What is written over in place, and can be saved all the same: how often each block of an array was written, and snapshots.

A snapshot costs nothing when it is taken. Whoever writes says so first (`touch`), and what a snapshot that is still there
has in those blocks is copied then: it takes the memory of what was written since, never more than the array. A block is
named by how often it was written, so that one which was saved before need not be read, let alone compared.

Rejected: a copy when the snapshot is taken (twice the memory of the store); to make writers wait until it is read (a save to a
slow disk takes minutes).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fbuf._host.memory.lazy_array import Identity, Lazy, block_rows
from fbuf._host.types import Array, bare


class _Snapshot:
    """Rows as they were. For one writer and any number of readers."""

    def __init__(self, read: Callable[[int, int], Array], rows: int, block: int) -> None:
        self._read, self._rows, self._block = read, rows, block
        self._kept: dict[int, Array] = {}  # blocks that were written since, as they were
        self._lock = threading.Lock()
        self._failed: Exception | None = None

    def keep(self, blocks: Sequence[int]) -> None:
        """Copies blocks that are about to be written."""
        with self._lock:
            for at in blocks:
                first = at * self._block
                if first < self._rows and at not in self._kept and self._failed is None:
                    try:
                        self._kept[at] = self._read(first, min(first + self._block, self._rows))
                    except Exception as error:  # no memory, a broken disk, damaged rows: who writes need not hear of it
                        self._failed = bare(error)
                        self._kept.clear()

    def read(self, start: int, stop: int) -> Array:
        """Rows. Raises MemoryError, or what reading raises: some were written over, and could not be kept."""
        found: list[Array] = []
        while start < stop or not found:
            at = start // self._block
            first, end = at * self._block, min((at + 1) * self._block, stop)
            with self._lock:  # a write waits for as long as it takes to copy a block
                if isinstance(self._failed, MemoryError):
                    raise MemoryError(
                        "fbuf: no memory to keep rows that were written over while they were saved; save again."
                    )
                if self._failed is not None:
                    raise self._failed
                kept = self._kept.get(at)
                found.append(self._read(start, end) if kept is None else kept[start - first : end - first].copy())
            start = max(end, start + 1)
        return found[0] if len(found) == 1 else np.concatenate(found)


class Tracked:
    """The blocks of an array of `rows` rows of so many bytes: which were written when, and what snapshots have of them."""

    def __init__(self, rows: int, nbytes: int) -> None:
        self.block = block_rows(rows, nbytes)
        self._written: Array = np.zeros(
            -(-max(rows, 1) // self.block), np.int64
        )  # the number of the last write to each
        self._writes = 0
        self._snapshots: list[weakref.ref[_Snapshot]] = []
        self._identity = Identity()

    def touch(self, start: int, stop: int) -> None:
        """Rows start..stop are about to be written."""
        if stop > start:
            blocks = slice(start // self.block, (stop - 1) // self.block + 1)
            if self._snapshots:
                self._keep(range(blocks.start, blocks.stop))
            self._writes += 1
            self._written[blocks] = self._writes

    def touch_at(self, rows: Array) -> None:
        """Rows int64[M] are about to be written."""
        if len(rows):
            blocks = rows // self.block
            if self._snapshots:
                self._keep(np.unique(blocks).tolist())
            self._writes += 1
            self._written[blocks] = self._writes

    def _keep(self, blocks: Sequence[int]) -> None:
        alive = [(reference, snapshot) for reference in self._snapshots if (snapshot := reference()) is not None]
        self._snapshots = [reference for reference, _ in alive]
        for _, snapshot in alive:
            snapshot.keep(blocks)

    def snapshot(self, shape: tuple[int, ...], dtype: Any, read: Callable[[int, int], Array]) -> Lazy:
        """The first `shape[0]` rows as they are now.

        Args:
          read: (start, stop) -> rows of an array as they are when it is called; never more than a block of them.
        """
        held = _Snapshot(read, shape[0], self.block)
        self._snapshots = [r for r in self._snapshots if r() is not None] + [weakref.ref(held)]
        marks, name, number = [], str(self._identity), -(-shape[0] // self.block)
        for at, written in enumerate(self._written[:number].tolist()):
            rows = min(self.block, shape[0] - at * self.block)
            marks.append(f"{name}:{at}:{written}:{rows}")
        return Lazy(shape, dtype, held.read, block=self.block, marks=marks)
