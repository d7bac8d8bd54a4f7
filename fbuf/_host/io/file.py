"""A file that rows are written to with `pwrite` and read from through a read-only mapping.

Writing through a mapping would turn a full disk into SIGBUS, which ends the process; a failed `pwrite` is an OSError.
Reading through one costs no call a row, and the page cache is shared between the two. A file gets its whole size at once
(`ftruncate`); the system allocates its blocks as they are first written. Only bytes that were written are read through the
mapping, because on some file systems (tmpfs) the first look at a hole allocates too.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import numpy as np

from fbuf._host.types import Array, StoreCorrupted, flat

_READ = 1 << 20


class File:
    """One open file, for one writer.

    Args:
      path: Where.
      size: Bytes of a new file, which replaces what is there; None: open what is there.
    Raises:
      OSError: it cannot be made or opened.
    """

    __slots__ = ("fd", "path", "size")
    _close = staticmethod(os.close)  # there until the last file is gone, which `os` is not at exit

    def __init__(self, path: str, size: int | None = None) -> None:
        self.fd = -1
        self.path = path
        with annotate_os_error("open", path):
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if size is None else os.O_CREAT | os.O_TRUNC)
            self.fd = os.open(path, flags, 0o644)
        if size is None:
            size = os.fstat(self.fd).st_size
        else:
            try:
                with annotate_os_error(f"give {size} bytes to", path):
                    os.ftruncate(self.fd, size)
            except OSError:
                self.close()
                unlink(path)
                raise
        self.size = size

    def write(self, data: memoryview | bytes, at: int) -> None:
        """All of `data`, from byte `at` on. Raises OSError; part of it may then be written."""
        left = memoryview(data).cast("B")
        while left.nbytes:
            with annotate_os_error(f"write {left.nbytes} bytes to", self.path):
                done = os.pwrite(self.fd, left, at)
                if done <= 0:
                    raise OSError(errno.EIO, "nothing was written")
            left, at = left[done:], at + done

    def scatter(self, rows: Array, places: Array, start: int = 0) -> None:
        """Rows uint8[M, row] to places int64[M] of that size; neighbours in one call."""
        if not len(places):
            return
        row = rows.shape[1]
        if (places[1:] - places[:-1] == 1).all():
            self.write(flat(np.ascontiguousarray(rows)), start + int(places[0]) * row)
            return
        order = np.argsort(places, kind="stable")
        places, rows = places[order], np.ascontiguousarray(rows[order])
        begin = np.flatnonzero(np.concatenate([[True], np.diff(places) != 1])).tolist()
        view = flat(rows)
        for first, last in zip(begin, [*begin[1:], len(places)], strict=True):
            self.write(view[first * row : last * row], start + int(places[first]) * row)

    def empty(self, at: int) -> None:
        """Forgets the bytes from `at` on, which nobody may be reading. Raises OSError."""
        with annotate_os_error("empty the end of", self.path):
            os.ftruncate(self.fd, at)
            os.ftruncate(self.fd, self.size)

    def read(self, at: int, size: int) -> bytes:
        """At most `size` bytes from `at` on; allocates nothing, not even for holes."""
        parts = []
        while size > 0:
            with annotate_os_error("read", self.path):
                part = os.pread(self.fd, min(size, _READ), at)
            if not part:
                break
            parts.append(part)
            at, size = at + len(part), size - len(part)
        return b"".join(parts)

    def sync(self) -> None:
        """Waits until what was written is on the disk. Raises OSError."""
        with annotate_os_error("flush", self.path):
            os.fsync(self.fd)

    def map(self) -> memoryview:
        """The whole file, read-only; it lives as long as something refers to it, even when the file is gone."""
        with annotate_os_error("map", self.path):
            return memoryview(mmap.mmap(self.fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ))

    def fill(self, out: Array, at: int) -> None:
        """Reads into a C-contiguous array, from byte `at` on; zeros beyond the end. Allocates nothing, not even for holes."""
        left = flat(out)
        while left.nbytes:
            with annotate_os_error("read", self.path):
                done = os.preadv(self.fd, [left], at)
            if not done:
                left[:] = bytes(left.nbytes)
                return
            left, at = left[done:], at + done

    def close(self) -> None:
        """No more writes; mappings stay."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._close(fd)

    def __del__(self) -> None:
        self.close()


def existing(path: str) -> File:
    """A file of a store that is opened again. Raises StoreCorrupted: it is not there."""
    if not os.path.exists(path):
        raise StoreCorrupted(
            f"Buffer.resume: {path} is missing; expected every file of the store. Put it back, or start a new store at "
            f"another path."
        )
    return File(path)


class annotate_os_error:
    """Gives the OSErrors of what is done inside the words a user needs: what, where, how much room, what to do.

    Args:
      instead: What else to do where there is no room, and what is as it was.
    """

    __slots__ = ("instead", "path", "what")

    def __init__(
        self, what: str, path: str, instead: str = "use a smaller capacity; the rows that were there are as before"
    ) -> None:
        self.what, self.path, self.instead = what, path, instead

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        number = error.errno or errno.EIO
        folder = os.path.dirname(self.path)
        try:
            disk = os.statvfs(folder)
            room = f"{disk.f_bavail * disk.f_frsize} bytes are free there"
        except OSError:
            room = "how much is free there cannot be told"
        if number in (errno.ENOSPC, errno.EDQUOT):
            fix = f"Make room in {folder}, or {self.instead}."
        elif number == errno.EFBIG:
            fix = f"Raise the limit on the size of files (ulimit -f), or {self.instead}."
        elif number in (errno.EMFILE, errno.ENFILE):
            fix = "Raise the limit on open files (ulimit -n), or close what holds them."
        elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
            fix = "Use a path that this process may write to."
        elif number in (errno.EEXIST, errno.ENOTDIR):
            fix = f"A file has a name that is to be a folder's: use the path of a folder, not {folder}."
        else:
            fix = f"See to the disk under {folder}, or use another path."
        raise OSError(number, f"fbuf: cannot {self.what} {self.path}: {os.strerror(number)}; {room}. {fix}") from error


def once(view: memoryview, at: int, size: int) -> Array:
    """Bytes of a whole mapping, copied; this process then keeps no page of it (more may have come than were asked for)."""
    out = np.frombuffer(view, np.uint8, size, at).copy()
    mapping = view.obj
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)  # what others read meanwhile is mapped anew
    return out


def unlink(path: str) -> None:
    """Removes a file, if that can be done: what it held is no longer needed."""
    try:
        os.unlink(path)
    except OSError:
        pass


def lock_file(what: str, fd: int, fix: str) -> None:
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


def sign_lock(fd: int) -> None:
    """Writes down who holds it. Raises OSError: the disk may be full."""
    mine = str(os.getpid()).encode()
    if os.pread(fd, 32, 0) != mine:  # to cut a file takes as long as to wait for it
        os.ftruncate(fd, 0)
        os.pwrite(fd, mine, 0)


def unlock_file(fd: int) -> None:
    """Gives it back, also where a forked child has the file open too."""
    fcntl.flock(fd, fcntl.LOCK_UN)
