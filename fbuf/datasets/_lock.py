"""Let one process at a time make a data set: a lock file in its folder, released with the process at the latest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from fbuf._host.io.lock import lock_path

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
    lock, file = None, path / NAME
    while lock is None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_path(
                f"{call}: the data set at {path}", str(file), "Wait until it is done, or pass another root=."
            )
        except FileNotFoundError:  # another process removed the folder in the meantime
            pass
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a lock file that stays locks nothing
            if lock.is_at(str(file)):
                file.unlink()
        lock.release()
        with contextlib.suppress(OSError):  # the first that is not empty
            for folder in made:
                folder.rmdir()
