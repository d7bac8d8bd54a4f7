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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from fbuf._host.io.file import annotate_os_error
from fbuf._host.io.lock import FileLock

Path = str | os.PathLike[str]
LOCK = "lock"
MAX_GENERATION = 10**12 - 1
"""The largest generation that fits in a name."""
_MANIFEST = re.compile(r"manifest-([0-9]{12})\.json")
_DATA = re.compile(r"data-([0-9]{12})\.safetensors")
_PARTIAL = re.compile(r"manifest-([0-9]{12})\.json\.new")


def manifest_name(generation: int) -> str:
    """Return `manifest-000000000007.json`."""
    return f"manifest-{generation:012d}.json"


def data_name(generation: int) -> str:
    """Return `data-000000000007.safetensors`."""
    return f"data-{generation:012d}.safetensors"


def partial_name(generation: int) -> str:
    """Return the name of a manifest that is still being written."""
    return f"{manifest_name(generation)}.new"


def is_data_name(name: str) -> bool:
    """Return whether a name is that of a data file."""
    return _DATA.fullmatch(name) is not None


def is_partial_name(name: str) -> bool:
    """Return whether a name is that of an unfinished manifest."""
    return _PARTIAL.fullmatch(name) is not None


def is_checkpoint_name(name: str) -> bool:
    """Return whether a name is that of a checkpoint's file."""
    return name == LOCK or any(form.fullmatch(name) for form in (_MANIFEST, _DATA, _PARTIAL))


def find_generations(names: Iterable[str]) -> list[int]:
    """Return the generations that have a manifest, newest first."""
    return sorted((int(found[1]) for found in map(_MANIFEST.fullmatch, names) if found), reverse=True)


def largest_number(names: Iterable[str]) -> int:
    """Return the largest number in the names, including files left by a killed save; 0 without any."""
    found = (form.fullmatch(name) for name in names for form in (_MANIFEST, _DATA, _PARTIAL))
    return max((int(match[1]) for match in found if match), default=0)


SAVE_ELSEWHERE = "save to another path; the checkpoint that was there is as before"
_MAX_CALL_BYTES = 1 << 30  # Linux moves at most 2 GiB a call


class ReadError(OSError):
    """The system cannot read a file, so that nothing is known of its bytes."""


class Disk:
    """The system calls, one to one. It has no state; tests override some."""

    def open(self, path: str, flags: int) -> int:
        """Open a file; neither follow a link nor wait for a pipe's other end."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    close = staticmethod(os.close)
    pwritev = staticmethod(os.pwritev)
    fsync = staticmethod(os.fsync)
    rename = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    mkdir = staticmethod(os.mkdir)
    isdir = staticmethod(os.path.isdir)
    listdir = staticmethod(os.listdir)

    def pread(self, fd: int, out: memoryview, at: int) -> int:
        """Read some bytes into `out`; return their number, 0 at the end."""
        return os.preadv(fd, [out], at)

    def size(self, fd: int) -> int:
        """Return the size of an open plain file. Raises OSError for anything else."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return status.st_size

    def is_at(self, lock: FileLock, path: str) -> bool:
        """Return whether the locked file is still the one at `path`. Raises OSError."""
        return lock.is_at(path)

    def start_writeback(self, fd: int, at: int, size: int) -> None:
        """Ask the system to start writing a part of a file to the disk, so that `fsync` waits less."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint; unwritten pages stay in the page cache
                os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)


DISK = Disk()
_PAUSES = (0.0, 0.05)
"""Seconds before a failed read is repeated: network disks fail now and then."""
_LASTING = (errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EBADF)
Result = TypeVar("Result")


def retried(call: Callable[[], Result]) -> Result:
    """Return the result of a call that changes nothing; repeat it if the system fails. Raises OSError: it fails each time."""
    for pause in _PAUSES:
        try:
            return call()
        except OSError as error:
            if error.errno in _LASTING:
                raise
            time.sleep(pause)
    return call()


def close_read(disk: Disk, fd: int) -> None:
    """Close a file that was only read; it is closed in any case."""
    with contextlib.suppress(OSError):
        disk.close(fd)


@contextlib.contextmanager
def closing(disk: Disk, fd: int, path: str) -> Iterator[None]:
    """Close a file after the `with` block wrote to it. Raises OSError: a write failed, which only `close` reported."""
    try:
        yield
    except BaseException:
        close_read(disk, fd)
        raise
    with annotate_os_error("close", path, SAVE_ELSEWHERE):
        disk.close(fd)


def write_all(disk: Disk, fd: int, path: str, parts: Sequence[memoryview], at: int) -> None:
    """Write bytes from byte `at` on: several parts of a few megabytes, or one. Raises OSError."""
    left = [part for part in parts if part.nbytes]
    while left:
        with annotate_os_error(f"write {sum(part.nbytes for part in left)} bytes to", path, SAVE_ELSEWHERE):
            done = disk.pwritev(fd, [part[:_MAX_CALL_BYTES] for part in left], at)
            if done <= 0:
                raise OSError(errno.EIO, "no bytes were written")
        at += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def read_into(disk: Disk, fd: int, path: str, out: memoryview, at: int) -> int:
    """Fill `out` from byte `at` on; return the number of bytes read. Raises ReadError."""
    got = 0
    while got < out.nbytes:
        part = out[got : got + _MAX_CALL_BYTES], at + got
        try:
            done = disk.pread(fd, *part)
        except OSError:
            done = _read_again(disk, fd, path, *part)
        if done <= 0:
            break
        got += done
    return got


def _read_again(disk: Disk, fd: int, path: str, out: memoryview, at: int) -> int:
    try:
        return retried(lambda: disk.pread(fd, out, at))
    except OSError as error:
        number = error.errno or errno.EIO
        raise ReadError(
            number,
            f"fbuf: cannot read {path} at byte {at}: {os.strerror(number)}. Try again; if it fails again, copy the folder to "
            f"another disk.",
        ) from error


def sync_folder(disk: Disk, path: str) -> None:
    """Sync the names in a folder, where the file system can. Raises OSError."""
    with annotate_os_error("sync", path, SAVE_ELSEWHERE):
        fd = disk.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            disk.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network file systems cannot
                raise
        finally:
            close_read(disk, fd)


def write_partial(disk: Disk, path: str, text: bytes, sync: bool, advice: str) -> None:
    """Create or replace a file that is to be renamed. Raises OSError."""
    with annotate_os_error("make", path, advice):
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    with closing(disk, fd, path):
        write_all(disk, fd, path, [memoryview(text)], 0)
        if sync:
            with annotate_os_error("sync", path, advice):
                disk.fsync(fd)
