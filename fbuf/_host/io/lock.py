"""A lock on an open file, held by the system: one that no process can keep after its end.

The file says which process holds it, for the message to the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os


def hold(what: str, fd: int, fix: str) -> None:
    """Takes the lock of the open file `fd`, or fails at once.

    Args:
      what: Who asks for what, for the message: `"Memmap: the store at /path"`.
      fix: What to do if it is held.
    Raises:
      BlockingIOError: this or another process holds it.
      OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace")
        who = "this process" if holder == str(os.getpid()) else f"process {holder or 'unknown'}"
        raise BlockingIOError(errno.EWOULDBLOCK, f"{what} is in use by {who}; expected nobody. {fix}") from None


def sign(fd: int) -> None:
    """Writes down who holds it. Raises OSError: the disk may be full."""
    mine = str(os.getpid()).encode()
    if os.pread(fd, 32, 0) != mine:  # to cut a file takes as long as to wait for it
        os.ftruncate(fd, 0)
        os.pwrite(fd, mine, 0)


def release(fd: int) -> None:
    """Gives it back, also where a forked child has the file open too."""
    fcntl.flock(fd, fcntl.LOCK_UN)
