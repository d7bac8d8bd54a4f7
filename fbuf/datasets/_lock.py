"""Let one process at a time make a data set: a lock file in its folder, released with the process at the latest."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fbuf._host.io.file import lock_file, sign_lock

_PATIENCE = 2.0  # seconds; the other process may be writing its last file
NAME = "lock"


@contextlib.contextmanager
def exclusive(call: str, path: Path, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of the data set at `path`; make its folder if needed.

    The lock file is removed afterwards, and so are folders made for it that stayed empty.

    Raises:
      BlockingIOError: another process makes this data set; the text names it.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    until = time.monotonic() + (_PATIENCE if patience is None else patience)
    while (fd := _try_lock(call, path, until)) is None:
        pass
    try:
        sign_lock(fd)
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path / NAME)
        os.close(fd)
        with contextlib.suppress(OSError):  # the first that is not empty
            for folder in made:
                folder.rmdir()


def _try_lock(call: str, path: Path, until: float) -> int | None:
    """Return the lock's descriptor; None: another process removed the file, or the folder, meanwhile."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(path / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, fd)
        while True:
            try:
                lock_file(f"{call}: the data set at {path}", fd, "Wait until it is done, or pass another root=.")
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path / NAME), os.fstat(fd)):
                on_failure.pop_all()
                return fd
    return None
