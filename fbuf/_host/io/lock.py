"""Locks on files: one holder at a time in all processes, released with the process at the latest.

A lock is held by the `FileLock` that took it, and by nothing else: process ids repeat among containers, and the text in the
file only names the holder in errors. A forked child closes its copies of the descriptors, so that a lock ends with the
process that took it. A lock is released even if the system refuses to unlock or close the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable

from fbuf._host.io.file import annotate_os_error

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems without locks."""
_TRIES = 100
_forking = threading.RLock()  # no fork between opening a file and registering its descriptor
_descriptors: dict[FileLock, tuple[int, Callable[[int], None]]] = {}
"""Open lock files of this process, and what closes them."""


class FileLock:
    """An exclusive lock on an open file.

    Args:
      what: Who asks for what, for errors: `"Memmap: the store at /path"`.
      open: Opens the file.
      fix: What to do if it is held.
      close: Closes the file.
    Raises:
      BlockingIOError: this or another process holds it.
      OSError: the file cannot be opened, or the file system has no locks.
    """

    __slots__ = ("_file", "_is_locked", "_users")

    def __init__(self, what: str, open: Callable[[], int], fix: str, close: Callable[[int], None] = os.close) -> None:
        self._is_locked = False
        self._file: tuple[int, int] | None = None
        self._users = [None]
        with _forking:
            fd = open()
            _descriptors[self] = fd, close
        try:
            try:
                self._file = _identity(os.fstat(fd))
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"{what} is in use by {self._holder(fd)}; expected no other user. {fix}"
                raise BlockingIOError(errno.EWOULDBLOCK, text) from None
            except OSError as error:
                number = error.errno or errno.EIO
                text = (
                    f"{what} cannot be locked: {os.strerror(number)}. Use a file system with locks, or check the disk."
                )
                raise OSError(number, text) from error
            self._is_locked = True
            with contextlib.suppress(OSError):  # a full disk, for one; only errors show it
                _sign(fd)
        except BaseException:
            self.release()
            raise

    def _holder(self, fd: int) -> str:
        if any(lock._is_locked and lock._file == self._file for lock in list(_descriptors)):
            return "this process"
        try:
            holder = os.pread(fd, 32, 0).decode(errors="replace")
        except OSError:
            holder = ""
        if not (holder.isascii() and holder.isdigit()):
            return "another process"
        return f"process {holder}" + (" of another container or machine" if int(holder) == os.getpid() else "")

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock. A forked child does not."""
        return self._is_locked and self in _descriptors

    def is_at(self, path: str) -> bool:
        """Return whether the locked file is still the one at `path`. Raises OSError."""
        try:
            return self.is_held and _identity(os.stat(path, follow_symlinks=False)) == self._file
        except (FileNotFoundError, NotADirectoryError):
            return False

    def share(self) -> None:
        """Add a user; the lock is held until each has released it."""
        self._users.append(None)

    def release(self) -> None:
        """Release the lock for one user. Runs in the garbage collector, so it takes no Python lock; never raises OSError."""
        with contextlib.suppress(IndexError):
            self._users.pop()
        if self._users:
            return
        fd, close = _descriptors.pop(self, (-1, os.close))
        if fd >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # at once, although a child may just be forked
            with contextlib.suppress(OSError):  # the descriptor is closed in any case
                close(fd)


def lock_path(what: str, path: str, fix: str) -> FileLock:
    """Lock the plain file at `path`, created if missing; links are not followed. Arguments and errors as for `FileLock`."""

    def opened() -> int:
        with annotate_os_error("open", path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            with annotate_os_error("look at", path):
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return fd
            raise OSError(errno.EINVAL, f"{what}: {path} is not a plain file. Remove it, or use another path.")
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise

    for _ in range(_TRIES):
        lock = FileLock(what, opened, fix)
        try:
            with annotate_os_error("look at", path):
                is_there = lock.is_at(path)
        except BaseException:
            lock.release()
            raise
        if is_there:
            return lock
        lock.release()  # its holder removed the file in the meantime
    raise BlockingIOError(errno.EWOULDBLOCK, f"{what}: {path} is replaced again and again. {fix}")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _sign(fd: int) -> None:
    """Write the process id into a locked file. Raises OSError."""
    mine = str(os.getpid()).encode()
    if os.pread(fd, 32, 0) != mine:  # to cut a file takes as long as to wait for it
        os.ftruncate(fd, 0)
        os.pwrite(fd, mine, 0)


def _close_in_child() -> None:
    for lock in list(_descriptors):
        fd, _ = _descriptors.pop(lock)
        with contextlib.suppress(OSError):
            os.close(fd)
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_close_in_child)
