"""A load: the newest generation that is whole.

If something of the newest is damaged, the one before is taken, with a warning that says what was wrong; if none is whole, an
error says what is wrong with each. All files are opened at once, so that a save which removes them meanwhile does no harm.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from typing import Literal, NoReturn, TypeVar

from fbuf._core.progress import Progress
from fbuf._formats.checkpoint.directory import DAMAGED, Folder
from fbuf._formats.checkpoint.errors import CheckpointNotFound
from fbuf._formats.checkpoint.filesystem import DISK, Disk
from fbuf._formats.checkpoint.reader import Saved
from fbuf._host.types import StoreCorrupted, without_traceback

Built = TypeVar("Built")
Verify = Literal["full", "lazy"]


def read(
    path: str | os.PathLike[str],
    *,
    verify: Verify = "full",
    progress: Progress = None,
    disk: Disk = DISK,
) -> Saved:
    """Opens the newest generation that is whole; if that is not the newest of all, a RuntimeWarning says why.

    Args:
      path: The folder that was given to `write`.
      verify: `"full"`: every byte is checked before anything is handed out. `"lazy"`: the manifest and the headers and sizes of
        files; each block when it is read, which may then raise StoreCorrupted.
      progress: As for `write`, while everything is checked.
    Raises:
      CheckpointNotFound: there is none.
      StoreCorrupted: there is one, and no generation of it is whole.
      VersionError: a later release has saved the newest.
      OSError: a file may not be read.
    Cost: `"full"`: each byte is read once. Memory: the manifest, and a megabyte.
    """
    folder = _folder(path, verify, disk)

    def opened(saved: Saved) -> Saved:
        if verify == "full":
            with saved.told(progress):
                saved.verify()
        return saved

    return _newest(folder, opened)


def restore(
    path: str | os.PathLike[str],
    build: Callable[[Saved], Built],
    *,
    verify: Verify = "full",
    progress: Progress = None,
    disk: Disk = DISK,
) -> Built:
    """What `build` makes of the newest generation that is whole: as `read`, but each byte is read once in all.

    `build` reads what it needs, each block is checked as it is read, and what it did not read is checked after it
    (`verify="full"`). If anything is damaged, what it made is dropped, and it is called again with the generation before.

    Args:
      build: Takes a `Saved`, which is closed after it returns. An error of its own ends the load, but for StoreCorrupted.
    Returns:
      What `build` returned.
    Raises:
      As `read`.
    """
    folder = _folder(path, verify, disk)

    def built(saved: Saved) -> Built:
        with saved, saved.told(progress):
            made = build(saved)
            if verify == "full":
                saved.verify()
            return made

    return _newest(folder, built)


def _folder(path: str | os.PathLike[str], verify: str, disk: Disk) -> Folder:
    if verify not in ("full", "lazy"):
        raise ValueError(f"fbuf.load: verify is {verify!r}; expected 'full' or 'lazy'.")
    return Folder(path, disk)


def _newest(folder: Folder, use: Callable[[Saved], Built]) -> Built:
    wrong: dict[int, Exception] = {}
    while True:
        there = folder.generations()  # again each time: a save may have put another in place, and removed this one
        left = [generation for generation in there if generation not in wrong]
        if not left:
            _nothing(folder, there, wrong)
        saved = None
        try:
            saved = Saved(folder, left[0])
            made = use(saved)
        except BaseException as error:
            if saved is not None:
                saved.close()
            if not isinstance(error, StoreCorrupted):
                raise
            if saved is not None:
                DAMAGED.add(saved.manifest.save)
            wrong[left[0]] = without_traceback(error)
            continue
        _warn(folder, saved, {g: e for g, e in wrong.items() if g > saved.generation})
        return made


def _nothing(folder: Folder, there: list[int], wrong: dict[int, Exception]) -> NoReturn:
    if not there:
        raise CheckpointNotFound(
            errno.ENOENT,
            f"fbuf.load: there is no checkpoint at {folder.path}; expected one. Give the path that fbuf.save was given.",
        )
    what = "; ".join(f"generation {g}: {wrong[g]}" for g in there)
    raise StoreCorrupted(
        f"fbuf.load: no generation at {os.path.join(folder.path, '')} is whole; expected one. {what}. Load another checkpoint, "
        f"or what is left of this one: verify='lazy'."
    )


def _warn(folder: Folder, saved: Saved, wrong: dict[int, Exception]) -> None:
    if wrong:
        what = "; ".join(f"generation {g}: {e}" for g, e in sorted(wrong.items(), reverse=True))
        warnings.warn(
            f"fbuf.load: generation {saved.generation} of {folder.path} is loaded, not the newest. {what}.",
            RuntimeWarning,
            stacklevel=4,
        )
