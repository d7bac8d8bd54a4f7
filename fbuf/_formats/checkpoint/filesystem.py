"""Every call to the system that a checkpoint makes, in one small class, so that tests can make each one fail.

Files are written with `pwrite`, never through a mapping: a full disk is then an OSError and not a SIGBUS. No link is
followed and nothing but a plain file is read: what lies in a folder may have been put there by others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from fbuf._host.io.file import annotate_os_error

INSTEAD = "save to another path; the checkpoint that was there is as before"
_MOST = 1 << 30  # Linux moves at most 2 GiB a call


class Disk:
    """The system's calls, one to one. It holds nothing, so one serves all."""

    def open(self, path: str, flags: int) -> int:
        """A descriptor; of a file, not of what a link points at, and without waiting for a pipe's other end."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    def close(self, fd: int) -> None:
        """Gives a descriptor back."""
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, at: int) -> int:
        """Writes some of `data`, and says how many bytes."""
        return os.pwrite(fd, data, at)

    def pread(self, fd: int, out: memoryview, at: int) -> int:
        """Reads some bytes into `out`, and says how many; 0: the end."""
        return os.preadv(fd, [out], at)

    def size(self, fd: int) -> int:
        """Bytes of an open plain file. Raises OSError for anything else."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return status.st_size

    def begin(self, fd: int, at: int, size: int) -> None:
        """Asks the system, where it can be asked, to begin writing a part of a file to the disk, so that less is waited for."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # advice: what is still being written stays in the page cache
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Waits until a file, or the names in a folder, will outlive a failure of power."""
        os.fsync(fd)

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name at once, in place of what has it."""
        os.replace(old, new)

    def unlink(self, path: str) -> None:
        """Removes a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Makes a folder."""
        os.mkdir(path)

    def isdir(self, path: str) -> bool:
        """Whether a folder is there."""
        return os.path.isdir(path)

    def listdir(self, path: str) -> list[str]:
        """Names in a folder."""
        return os.listdir(path)


DISK = Disk()


def write_all(disk: Disk, fd: int, path: str, data: memoryview | bytes, at: int) -> None:
    """All of `data` from byte `at` on. Raises OSError."""
    left = memoryview(data).cast("B")
    while left.nbytes:
        with annotate_os_error(f"write {left.nbytes} bytes to", path, INSTEAD):
            done = disk.pwrite(fd, left[:_MOST], at)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
        left, at = left[done:], at + done


def read_into(disk: Disk, fd: int, path: str, out: memoryview, at: int) -> int:
    """Fills `out` from byte `at` on, and says how much of it there was. Raises OSError."""
    got = 0
    while got < out.nbytes:
        with annotate_os_error("read", path):
            done = disk.pread(fd, out[got : got + _MOST], at + got)
        if done <= 0:
            break
        got += done
    return got


def sync_folder(disk: Disk, path: str) -> None:
    """Makes the names in a folder outlive a failure of power, where the file system can. Raises OSError."""
    with annotate_os_error("sync", path, INSTEAD):
        fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some that go over a network cannot
                raise
        finally:
            disk.close(fd)
