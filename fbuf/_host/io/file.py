"""Files that are written with `pwrite` and read through a read-only mapping.

Writing through a mapping would turn a full disk into SIGBUS, which ends the process; a failed `pwrite` is an OSError. A file
gets its whole size at once (`ftruncate`), and the system allocates blocks as they are written. Only written bytes are read
through the mapping: on tmpfs, reading a hole allocates too.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat

import numpy as np

from fbuf._host.types import Array, StoreCorrupted, damaged_file, flat

_READ = 1 << 20


class File:
    """One open file, for one writer.

    Args:
      path: Where.
      size: Bytes of a new file, which replaces what is there; None: open what is there.
    Raises:
      OSError: it cannot be made or opened.
      StoreCorrupted: it is a link, a pipe, or anything but a plain file.
    """

    __slots__ = ("fd", "path", "size")
    _close = staticmethod(os.close)  # there until the last file is gone, which `os` is not at exit

    def __init__(self, path: str, size: int | None = None) -> None:
        self.fd = -1
        self.path = path
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self.fd = os.open(path, flags | (0 if size is None else os.O_CREAT | os.O_TRUNC), 0o644)
            status = os.fstat(self.fd)
        except OSError as error:
            self.close()
            if error.errno == errno.ELOOP:
                raise damaged_file(f"{path} is a link", "a plain file") from None
            with annotate_os_error("open", path):
                raise
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise damaged_file(f"{path} is not a plain file", "one")
        if size is None:
            size = status.st_size
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
        """Write all of `data` from byte `at` on. Raises OSError; part of it may then be written."""
        left = memoryview(data).cast("B")
        while left.nbytes:
            with annotate_os_error(f"write {left.nbytes} bytes to", self.path):
                done = os.pwrite(self.fd, left, at)
                if done <= 0:
                    raise OSError(errno.EIO, "nothing was written")
            left, at = left[done:], at + done

    def scatter(self, rows: Array, places: Array, start: int = 0) -> None:
        """Write rows uint8[M, row] to places int64[M] of that size; neighbours in one call."""
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
        """Erase the bytes from `at` on, which no reader uses. Raises OSError."""
        with annotate_os_error("empty the end of", self.path):
            os.ftruncate(self.fd, at)
            os.ftruncate(self.fd, self.size)

    def read(self, at: int, size: int) -> bytes:
        """Return at most `size` bytes from `at` on; allocates nothing, not even for holes."""
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
        """Wait until the written bytes are on disk. Raises OSError."""
        with annotate_os_error("flush", self.path):
            os.fsync(self.fd)

    def map(self) -> memoryview:
        """Return the whole file, read-only; the mapping outlives the file."""
        with annotate_os_error("map", self.path):
            return memoryview(mmap.mmap(self.fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ))

    def fill(self, out: Array, at: int) -> None:
        """Read into a C-contiguous array from byte `at` on. Allocates nothing, not even for holes.

        Raises:
          StoreCorrupted: the file ends before.
        """
        left = flat(out)
        while left.nbytes:
            with annotate_os_error("read", self.path):
                done = os.preadv(self.fd, [left], at)
            if not done:
                raise cut_short(self.path, at, self.size)
            left, at = left[done:], at + done

    def close(self) -> None:
        """Close the file for writing; mappings stay. Raises OSError; the file is closed in any case."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with annotate_os_error("close", self.path):
                self._close(fd)

    def __del__(self) -> None:
        try:
            if self.fd >= 0:
                self._close(self.fd)
        except Exception:  # what was written is lost no more than in a crash; `flush` would have said so
            pass


def exists(path: str) -> bool:
    """Return whether something is at a path. Raises OSError where the system does not say (`os.path.exists`: no)."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def existing(path: str) -> File:
    """Open a file of an existing store. Raises StoreCorrupted if it is missing."""
    if not exists(path):
        raise StoreCorrupted(f"Buffer.resume: {path} is missing; expected every file. Restore it, or use another path.")
    return File(path)


_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room in {folder}, or {instead}."),
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or {instead}.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit on open files (ulimit -n), or close some."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Use a path that this process may write to."),
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Use the path of a folder; {folder} is a file."),
    errno.EISDIR: "Remove the folder of that name, or use another path.",
    errno.ELOOP: "Replace the link with the file itself; fbuf follows no links in its folders.",
}


class annotate_os_error:
    """Add to an OSError what failed, where, how much room there is, and what to do.

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
        fix = _FIXES.get(number, "Check the disk under {folder}, or use another path.")
        fix = fix.format(folder=folder, instead=self.instead)
        raise OSError(number, f"fbuf: cannot {self.what} {self.path}: {os.strerror(number)}; {room}. {fix}") from error


def check_size(view: memoryview, path: str) -> None:
    """Raise StoreCorrupted if the file of a mapping was cut short: reading beyond its end would end the process (SIGBUS)."""
    mapping = view.obj
    if not isinstance(mapping, mmap.mmap):
        return
    with annotate_os_error("look at", path):
        size = mapping.size()
    if size < view.nbytes:
        raise cut_short(path, size, view.nbytes)


def cut_short(path: str, size: int, expected: int) -> StoreCorrupted:
    """Return the error of a file that lost its end."""
    return StoreCorrupted(
        f"{path} has {size} bytes; expected {expected}: it was cut short while its store is open. Load the last checkpoint "
        f"with fbuf.load(path)."
    )


def once(view: memoryview, at: int, size: int, path: str) -> Array:
    """Return a copy of bytes of the mapping of a file, and release its pages. Raises StoreCorrupted: it was cut short."""
    check_size(view, path)
    out = np.frombuffer(view, np.uint8, size, at).copy()
    mapping = view.obj
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)  # pages that others read are mapped again
    return out


def unlink(path: str) -> None:
    """Remove a file if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)
