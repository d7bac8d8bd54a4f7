"""One process at a time makes a data set: a lock on a file beside its pieces, which ends with the process at the latest."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fbuf._host.io.file import lock_file, sign_lock

_PATIENCE = 2.0  # seconds: another process may have no more to write than what the data set is made of
NAME = "lock"


@contextlib.contextmanager
def held(call: str, path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of the data set at `path`, whose folder is made.

    Its file goes with it, and so do folders that were made for it and in which nothing came to lie: nothing is left of a data
    set that is deleted, or of one that was never begun.

    Raises:
      BlockingIOError: another process makes this data set; the text names it.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    until = time.monotonic() + (_PATIENCE if patience is None else patience)
    fd = -1
    while fd < 0:
        fd = _taken(call, path, until)
    try:
        sign_lock(fd)
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / NAME)
        os.close(fd)
        with contextlib.suppress(OSError):  # of the first that is not empty
            for folder in made:
                folder.rmdir()


def _taken(call: str, path: Path, until: float) -> int:
    """The lock's descriptor; -1: another has removed the file, or the folder, meanwhile."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return -1
    try:
        while True:
            try:
                lock_file(f"{call}: the data set at {path}", fd, "Wait until it is done, or give another root=.")
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path / NAME), os.fstat(fd)):
                return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return -1
