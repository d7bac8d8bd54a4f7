"""Copy what a save will write, so that it can run in a thread while its arrays are donated or written."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK, Path
from fbuf._formats.checkpoint.layout import Plan, plan
from fbuf._formats.checkpoint.write import NEW, PendingArray, PreviousSave
from fbuf._host.memory.lazy_array import Source
from fbuf._host.types import Array


class Snapshot:
    """A source, copied as far as the last save lacks it. Other blocks cannot be read."""

    def __init__(self, plan: Plan, last: PreviousSave, path: str) -> None:
        self._name, self._path, layout, pending = plan.name, path, plan.layout, PendingArray(plan, last)
        self.shape, self.dtype, self.marks = layout.shape, layout.dtype, plan.marks
        self.block, self.cuts, self.keys = layout.block, layout.cuts, layout.keys
        self._blocks = dict[tuple[int, int], Array]()
        for i, data in pending.new_blocks():
            block = np.array(np.frombuffer(data, np.uint8)).view(layout.dtype).reshape(layout.block_shape(i))
            self._blocks[layout.block_span(i)] = block
        self.compared = None if last.manifest is None else (last.manifest.save, pending.file != NEW)

    def __getitem__(self, rows: Any) -> Array:
        span = rows.indices(self.shape[0])[:2] if isinstance(rows, slice) else (0, 1)
        if span not in self._blocks:
            raise OSError(
                errno.EIO,
                f"fbuf.save: rows {span[0]} to {span[1]} of array '{self._name}' were not copied, and the last save of them in "
                f"{self._path} cannot be read, is damaged or was replaced. Save once with wait=True.",
            )
        return self._blocks[span]


def snapshot(path: Path, arrays: Mapping[str, Source], copied: Callable[[str, Source], bool]) -> dict[str, Any]:
    """Return sources for a later save to `path`: those `copied` selects as `Snapshot`s, and the others.

    Raises:
      As `write`, for invalid sources; VersionError, OSError: the last save cannot be read.
    Cost: blocks without marks are read and compared with the last save. Memory: those that changed.
    """
    plans = plan({name: source for name, source in arrays.items() if copied(name, source)})
    folder = Folder(path, DISK)
    with contextlib.closing(PreviousSave(folder)) as last:
        return {**arrays, **{plan.name: Snapshot(plan, last, folder.path) for plan in plans}}
