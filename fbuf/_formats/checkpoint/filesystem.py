"""The names of a checkpoint's files, and every system call it makes.

Only these names are ever opened, written or removed, whatever a manifest says. Tests replace `Disk` to make each call fail.
Files are written with `pwrite`, so that a full disk raises OSError; a mapping would end the process with SIGBUS. Links are
not followed, and only plain files are read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable

from fbuf._host.io.file import telling

LOCK = "lock"
LAST = 10**12 - 1
"""The largest number of a generation that a name has room for."""
_MANIFEST = re.compile(r"manifest-([0-9]{12})\.json")
_DATA = re.compile(r"data-([0-9]{12})\.safetensors")
_NEW = re.compile(r"manifest-([0-9]{12})\.json\.new")


def manifest_name(generation: int) -> str:
    """`manifest-000000000007.json`"""
    return f"manifest-{generation:012d}.json"


def data_name(generation: int) -> str:
    """`data-000000000007.safetensors`"""
    return f"data-{generation:012d}.safetensors"


def new_name(generation: int) -> str:
    """What a manifest is called until it is whole."""
    return f"{manifest_name(generation)}.new"


def is_data(name: str) -> bool:
    """Whether it is a data file's name."""
    return _DATA.fullmatch(name) is not None


def is_new(name: str) -> bool:
    """Whether it is the name of a manifest that is not whole."""
    return _NEW.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Whether a checkpoint has files of such a name."""
    return name == LOCK or any(form.fullmatch(name) for form in (_MANIFEST, _DATA, _NEW))


def generations(names: Iterable[str]) -> list[int]:
    """Those that have a manifest, newest first."""
    return sorted((int(found[1]) for found in map(_MANIFEST.fullmatch, names) if found), reverse=True)


def last_number(names: Iterable[str]) -> int:
    """The largest number that any file of ours has, also one that a killed save left; 0: none."""
    found = (form.fullmatch(name) for name in names for form in (_MANIFEST, _DATA, _NEW))
    return max((int(match[1]) for match in found if match), default=0)


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
        with telling(f"write {left.nbytes} bytes to", path, INSTEAD):
            done = disk.pwrite(fd, left[:_MOST], at)
            if done <= 0:
                raise OSError(errno.EIO, "nothing was written")
        left, at = left[done:], at + done


def read_into(disk: Disk, fd: int, path: str, out: memoryview, at: int) -> int:
    """Fills `out` from byte `at` on, and says how much of it there was. Raises OSError."""
    got = 0
    while got < out.nbytes:
        with telling("read", path):
            done = disk.pread(fd, out[got : got + _MOST], at + got)
        if done <= 0:
            break
        got += done
    return got


def sync_folder(disk: Disk, path: str) -> None:
    """Makes the names in a folder outlive a failure of power, where the file system can. Raises OSError."""
    with telling("sync", path, INSTEAD):
        fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some that go over a network cannot
                raise
        finally:
            disk.close(fd)
