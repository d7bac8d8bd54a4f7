"""One file of a source as a file on the disk: whole and right under its name, or not there.

What arrives goes to `<name>.part`; `<name>.part.json`, written before the first byte, says of which file these bytes are. After
any end, kill -9 included, the next call asks for the missing bytes only, unless the file is another one by now. What was
there is hashed again, so one hash speaks for all bytes. A file whose hash is wrong (after a failure of power its end may be
zeros), or that is another by now, is fetched once more from its first byte.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from fbuf.datasets._source._digest import Digest
from fbuf.datasets._source._entry import Entry, Progress, Source
from fbuf.datasets._source._errors import SourceChanged, SourceError, SpaceError

_BLOCK = 1 << 18


def fetch(source: Source, entry: Entry, path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Brings a file to the disk, or finishes bringing it.

    Args:
      path: Where; its folder is made. A file that is there and has the listed size and hash is left as it is.
      progress: Called with bytes there and bytes in all, what was there before included.
    Returns:
      `path`.
    Raises:
      SourceError: it cannot be had now; what arrived is kept for the next call. SourceChanged: it was replaced.
      FileCorrupted: whole, and not what was listed; nothing of it is kept.
      SpaceError: the disk is full; what arrived is kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _telling(path), _locked(path) as part:
        if _is_whole(path, entry):
            part.discard()
            return path
        for last in (False, True):
            try:
                digest = _bring(source, entry, part, part.resumable(entry), progress)
                if digest.wrong() is None:
                    part.finish(path)
                    return path
                part.empty()
                if last:
                    part.discard()
                    digest.check()
            except SourceChanged:
                part.empty()
                if last:
                    part.discard()
                    raise
    raise AssertionError


def _bring(source: Source, entry: Entry, part: _Part, begin: int, progress: Progress | None) -> Digest:
    """All bytes from `begin` on, and the hash of all."""
    digest = Digest(entry)
    part.hash(digest, begin)
    stream = source.stream(entry, begin, part.validator(entry))
    try:
        while data := stream.read(_BLOCK):
            if digest.size == begin == 0:
                part.describe(entry, stream.validator)
            part.append(data, digest.size)
            digest.update(data)
            if progress is not None:
                progress(stream.position, stream.total)
    finally:
        stream.close()
    return digest


def _is_whole(path: Path, entry: Entry) -> bool:
    """Whether the file is there, as it was listed."""
    digest = Digest(entry)
    try:
        with path.open("rb") as file:
            if entry.size is not None and os.fstat(file.fileno()).st_size != entry.size:
                return False
            while data := file.read(1 << 20):
                digest.update(data)
    except FileNotFoundError:
        return False
    return digest.wrong() is None


class _Part:
    """What has arrived of a file, under its own name, locked."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        self._about = path.with_name(path.name + ".json")

    def resumable(self, entry: Entry) -> int:
        """Bytes that are there and are of this very file; others are thrown away."""
        size, about = os.fstat(self.fd).st_size, self._read()
        ours = about.get("identity") == entry.identity
        if entry.identity is None:
            ours = ours and about.get("address") == entry.address and about.get("validator") is not None
        if not size or not about or not ours:
            self.empty()
            return 0
        return size

    def validator(self, entry: Entry) -> str | None:
        """What the server said of the bytes that are there, if it is the same server."""
        about = self._read()
        value = about.get("validator") if about.get("address") == entry.address else None
        return value if type(value) is str else None

    def hash(self, digest: Digest, size: int) -> None:
        """Adds the first `size` bytes."""
        at = 0
        while at < size and (data := os.pread(self.fd, min(1 << 20, size - at), at)):
            digest.update(data)
            at += len(data)

    def describe(self, entry: Entry, validator: str | None) -> None:
        """Says of which file the bytes are that will be appended."""
        value = {"identity": entry.identity, "address": entry.address, "validator": validator}
        new = self._about.with_name(self._about.name + ".new")
        new.write_text(json.dumps(value))
        os.replace(new, self._about)

    def append(self, data: bytes, at: int) -> None:
        """Writes all of `data` at the end."""
        left = memoryview(data)
        while left:
            done = os.pwrite(self.fd, left, at)
            left, at = left[done:], at + done

    def empty(self) -> None:
        """Throws the bytes away, then what is said of them."""
        os.ftruncate(self.fd, 0)
        self._about.unlink(missing_ok=True)

    def discard(self) -> None:
        """Leaves nothing."""
        self._about.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def finish(self, path: Path) -> None:
        """Gives the file its name, for good."""
        os.fsync(self.fd)
        os.replace(self.path, path)
        self._about.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self) -> dict[str, object]:
        try:
            value = json.loads(self._about.read_text()[:65536])
        except (OSError, ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[_Part]:
    """The part of a file, for one process at a time. Raises SourceError: another has it."""
    name = path.with_name(path.name + ".part")
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SourceError(f"{name}: another process is fetching this file. Wait until it has ended.") from None
            try:
                same = os.path.samestat(os.stat(name), os.fstat(fd))
            except FileNotFoundError:
                same = False
            if same:  # it was not finished by another between opening and locking
                yield _Part(name, fd)
                return
        finally:
            os.close(fd)


@contextlib.contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, SpaceError):
            raise SpaceError(
                error.errno, f"{path}: the disk is full. Make room and call again: what arrived is kept"
            ) from error
        raise
