"""`write`: the next generation of a checkpoint, put in place when all of it is on the disk."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from fbuf._core.progress import Progress
from fbuf._formats.checkpoint.dedupe import Old
from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.errors import VersionError
from fbuf._formats.checkpoint.filesystem import DISK, Disk
from fbuf._formats.checkpoint.json_limits import MOST_DEPTH
from fbuf._formats.checkpoint.sources import Source, plan
from fbuf._formats.checkpoint.write_blocks import Save


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
