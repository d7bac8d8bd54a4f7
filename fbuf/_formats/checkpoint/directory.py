"""A checkpoint's folder: its generations, its lock, and what may be removed from it.

A save holds the lock, writes its data file and a manifest, waits for the disk, and only then gives the manifest its name; so
whatever moment it is killed at, the newest manifest is whole and so is all it names. What no kept manifest names is removed
last of all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterator

from fbuf._formats.checkpoint.data_file import OpenFile, open_plain
from fbuf._formats.checkpoint.errors import VersionError
from fbuf._formats.checkpoint.filesystem import INSTEAD, Disk, read_into, sync_folder, write_all
from fbuf._formats.checkpoint.manifest import MOST_BYTES, Manifest
from fbuf._formats.checkpoint.manifest_parse import Damaged, decode
from fbuf._formats.checkpoint.names import (
    LAST,
    LOCK,
    data_name,
    generations,
    is_data,
    is_new,
    last_number,
    manifest_name,
    new_name,
)
from fbuf._host.io.file import annotate_os_error, lock_file, sign_lock, unlock_file
from fbuf._host.types import StoreCorrupted

DAMAGED: set[str] = set()
"""Ids of saves in which this process found a damaged block: no save builds on one, nor counts it among those it keeps."""
LOST: set[str] = set()
"""Ids of saves whose data file the disk failed to take when it was waited for later. To wait again proves nothing: the system
may have dropped what it could not write, while reading still shows it. No save builds on such a file."""
_known: dict[str, tuple[bytes, Manifest]] = {}
"""By path: the manifest that this process wrote last, as bytes and parsed. Only what is on the disk is believed."""
_MOST_KNOWN, _FEW = 1 << 20, 4
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Folder:
    """Where a checkpoint lies."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk) -> None:
        self.path, self.disk = os.path.realpath(os.fspath(path)), disk

    def file(self, name: str) -> str:
        """Path of a file."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """What is there; nothing if there is no folder. Raises OSError."""
        try:
            with annotate_os_error("list", self.file("")):
                return sorted(self.disk.listdir(self.path))
        except FileNotFoundError:
            return []

    def generations(self) -> list[int]:
        """Those that have a manifest, newest first."""
        return generations(self.names())

    def remember(self, text: bytes, manifest: Manifest) -> None:
        """Keeps a manifest that is about to be written: the next save of this process need not parse it."""
        _known.pop(self.path, None)
        if len(text) <= _MOST_KNOWN:
            _known[self.path] = text, manifest
        while len(_known) > _FEW:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread did
                del _known[next(iter(_known))]

    def manifest(self, generation: int, known: bool = False) -> Manifest:
        """A manifest; `known`: one that this process wrote is not parsed. Raises StoreCorrupted, VersionError, OSError."""
        path = self.file(manifest_name(generation))
        fd, size = open_plain(self.disk, path)
        try:
            if size > MOST_BYTES:
                raise StoreCorrupted(f"{path} has {size} bytes; expected at most {MOST_BYTES}")
            text = bytearray(size)
            try:
                got = read_into(self.disk, fd, path, memoryview(text), 0)
            except OSError as error:
                raise StoreCorrupted(f"{path} cannot be read: {error}") from error
            mine, manifest = _known.get(self.path, (b"", None)) if known else (b"", None)
            if manifest is not None and manifest.generation == generation and mine == text[:got]:
                return manifest
            return decode(bytes(text[:got]), generation)
        except Damaged as error:
            raise StoreCorrupted(f"{path} is damaged: {error}") from None
        except VersionError as error:
            raise VersionError(f"fbuf: {path} {error}.") from None
        finally:
            self.disk.close(fd)

    def whole(self, manifest: Manifest) -> bool:
        """Whether all files that a manifest names are there, sizes and headers as it says, and no block known to be damaged."""
        if manifest.save in DAMAGED:
            return False
        try:
            for entry in manifest.files:
                OpenFile(self.disk, self.path, entry).close()
        except StoreCorrupted:
            return False
        return True

    def make(self, sync: bool) -> None:
        """Makes the folder, and those that it lies in."""
        missing, path = [], self.path
        while not self.disk.isdir(path) and path != os.path.dirname(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with annotate_os_error("make", os.path.join(path, "")), contextlib.suppress(FileExistsError):
                self.disk.mkdir(path)
            if sync:
                sync_folder(self.disk, os.path.dirname(path))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other savers away. Raises BlockingIOError: one is at work; FileExistsError: a live store lies there."""
        path = self.file(LOCK)
        with annotate_os_error("open", path, INSTEAD):
            fd = self.disk.open(path, os.O_RDWR | os.O_CREAT)
        held = False
        try:
            try:
                lock_file(f"fbuf.save: the checkpoint at {self.path}", fd, "Wait for that save, or give another path.")
                held = True
                with contextlib.suppress(
                    OSError
                ):  # what killed saves left may fill the disk, and goes only under the lock
                    sign_lock(fd)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    f"fbuf.save: the file system of {self.path} has no locks; two saves there at once would spoil one another.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            if "manifest.json" in self.names():
                raise FileExistsError(
                    errno.EEXIST,
                    f"fbuf.save: {self.path} holds the files of a live store; expected a checkpoint or nothing. Give the "
                    f"checkpoint a folder of its own.",
                )
            yield
        finally:
            if held:
                unlock_file(fd)
            self.disk.close(fd)

    def next_number(self) -> int:
        """The number of the next generation. Raises FileExistsError: a file has the last there is, which no save gave it."""
        number = last_number(self.names()) + 1
        if number > LAST:  # its name would be none of ours: saved, and never found again
            raise FileExistsError(
                errno.EEXIST,
                f"fbuf.save: a file in {self.path} has the number {LAST}, which is the last there is; expected smaller ones. "
                f"Give another path, or remove that file: no save has written it.",
            )
        return number

    def publish(
        self, generation: int, text: bytes, sync: bool, named: bool, waiting: Callable[[], None] | None
    ) -> None:
        """Puts a manifest in place: from then on its generation is the newest.

        Args:
          named: The names of all its data files are on the disk for sure.
          waiting: Returns once the data file is on the disk, which it may be on its way to; None: there is none.
        """
        new, path = self.file(new_name(generation)), self.file(manifest_name(generation))
        with annotate_os_error("make", new, INSTEAD):
            fd = self.disk.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self.disk, fd, new, text, 0)
            if sync:
                with annotate_os_error("sync", new, INSTEAD):
                    self.disk.fsync(fd)
        finally:
            self.disk.close(fd)
        if sync and not named:
            sync_folder(self.disk, self.path)  # the data file's name, before anything names it
        if waiting is not None:
            waiting()
        with annotate_os_error("rename", new, INSTEAD):
            self.disk.rename(new, path)
        if sync:
            sync_folder(self.disk, self.path)

    def withdraw(self, generation: int) -> None:
        """Removes what a save that failed has written, the manifest first."""
        for name in (manifest_name(generation), new_name(generation), data_name(generation)):
            with contextlib.suppress(OSError):
                self.disk.unlink(self.file(name))

    def sweep(self) -> None:
        """Removes what killed saves left: they may have filled the disk."""
        names = self.names()
        newest = max(generations(names), default=0)
        left = [n for n in names if is_new(n) or (is_data(n) and n > data_name(newest))]
        self._remove(left)

    def prune(self, latest: Manifest, before: Manifest | None, keep: int) -> None:
        """Removes all but the latest generation and the newest others that are whole, `keep` in all.

        Args:
          before: A generation that is whole, if one is known.
        Raises:
          OSError, VersionError: a generation cannot be looked at; nothing was removed.
        """
        names = self.names()
        kept = [latest]
        for generation in generations(names):
            if len(kept) >= keep:
                break
            if generation != latest.generation:
                with contextlib.suppress(StoreCorrupted):
                    if before is not None and before.generation == generation:
                        kept.append(before)
                    elif self.whole(manifest := self.manifest(generation)):
                        kept.append(manifest)
        manifests = {manifest_name(manifest.generation) for manifest in kept}
        named = {entry.name for manifest in kept for entry in manifest.files}
        old = [manifest_name(g) for g in generations(names) if manifest_name(g) not in manifests]
        data = [name for name in names if is_data(name) and name not in named]
        self._remove([*reversed(old), *data])

    def _remove(self, names: list[str]) -> None:
        for name in names:
            try:
                with annotate_os_error("remove", self.file(name)):
                    self.disk.unlink(self.file(name))
            except FileNotFoundError:
                pass
            except OSError as error:
                warnings.warn(f"{error} The next save tries again.", RuntimeWarning, stacklevel=2)
