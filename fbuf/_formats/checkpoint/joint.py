"""Write one generation by several processes: each writes its own arrays, and the first publishes one manifest.

A save of N processes takes N numbers. Each process writes the data file of its number, and a partial manifest that names its
blocks. When all have, the first process joins these and renames the manifest, which has the largest number. Until then the
files of the save are newer than every manifest: the next save removes them, whichever process was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from fbuf._core.progress import Progress
from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK, Disk, Path
from fbuf._formats.checkpoint.layout import plan
from fbuf._formats.checkpoint.manifest import ArrayEntry, FileEntry, Manifest
from fbuf._formats.checkpoint.write import PreviousSave, Save, SaveName, Written, check_settings, prune
from fbuf._host.memory.lazy_array import Source
from fbuf._host.types import StoreCorrupted

T = TypeVar("T")
Meta = dict[str, Any]


class Group(Protocol):
    """Processes that make the same calls in the same order."""

    index: int
    count: int

    def first(self, work: Callable[[], str]) -> str:
        """Return in every process the text of `work` in the first one. Raises RuntimeError elsewhere if it failed."""

    def each(self, work: Callable[[], T]) -> T:
        """Return the result of `work` once all processes have one. Raises RuntimeError if it failed in another."""


def write_jointly(
    path: Path,
    arrays: Mapping[str, Source],
    meta: Meta,
    group: Group,
    join_meta: Callable[[Sequence[Meta]], Meta],
    *,
    keep: int = 2,
    sync: bool = True,
    progress: Progress = None,
    disk: Disk = DISK,
) -> Written:
    """Save arrays as `write` does, those of all processes as one generation.

    Args:
      path: A folder that all processes see.
      arrays: Sources of this process by name; a name occurs in one process.
      meta: JSON of this process.
      join_meta: Makes one description from those of all processes.
    Raises:
      As `write`; RuntimeError: another process failed. The previous generations are intact.
    """
    folder = Folder(path, disk)
    with contextlib.ExitStack() as stack:

        def reserve() -> str:
            folder.create(sync)
            stack.enter_context(folder.locked())
            folder.remove_leftovers()
            return secrets.token_hex(16) + str(folder.next_number(group.count))

        agreed = group.first(reserve)
        id, numbers = agreed[:32], range(int(agreed[32:]), int(agreed[32:]) + group.count)

        def write_own() -> tuple[Save, Manifest, PreviousSave]:
            check_settings(meta, keep)
            plans = plan(arrays)
            previous = stack.enter_context(contextlib.closing(PreviousSave(folder)))
            save = Save(folder, previous, plans, sync, SaveName(id, numbers[group.index]))
            stack.callback(save.close)
            manifest = save.write(meta, progress)
            if group.index:
                save.written += folder.write_partial(manifest)
            return save, manifest, previous

        whole: Manifest | None = None

        def publish() -> str:
            nonlocal whole
            whole = _joined([manifests, *(_part(folder, id, n) for n in numbers[1:])], numbers[-1], join_meta)
            save.written += folder.publish(whole, sync, named=False)
            for number in numbers[1:-1]:  # the last was renamed
                folder.remove_partial(number)
            return str(sum(entry.layout.nbytes for entry in whole.arrays.values()))

        try:
            save, manifests, previous = group.each(write_own)
            total = group.first(publish)
        except BaseException:
            for number in () if group.index else numbers:  # another process may be a remainder of an earlier run
                folder.remove_generation(number)
            raise

        def remove_old() -> str:
            assert whole is not None
            prune(folder, whole, previous, keep)
            return ""

        group.first(remove_old)  # a failure from here on leaves the new generation, and no process returns before
    return Written(numbers[-1], save.written, int(total))


def _part(folder: Folder, id: str, number: int) -> Manifest:
    try:
        part = folder.manifest(number, partial=True)
    except StoreCorrupted as error:
        raise RuntimeError(f"fbuf.save: {error}. Give a path that all processes see.") from None
    if part.save != id:
        raise RuntimeError(f"fbuf.save: another save writes to {folder.path}. Wait for it, or give another path.")
    return part


def _joined(parts: Sequence[Manifest], generation: int, join_meta: Callable[[Sequence[Meta]], Meta]) -> Manifest:
    files: dict[str, FileEntry] = {}
    arrays: dict[str, ArrayEntry] = {}
    for part in parts:
        for entry in part.files:
            files.setdefault(entry.name, entry)
        place = np.array([list(files).index(entry.name) for entry in part.files] or [0], np.int64)
        arrays |= {name: dataclasses.replace(entry, file=place[entry.file]) for name, entry in part.arrays.items()}
    meta = join_meta([part.meta for part in parts])
    return Manifest(generation, parts[0].save, meta, list(files.values()), arrays)
