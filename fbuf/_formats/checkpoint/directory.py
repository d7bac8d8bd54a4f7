"""A checkpoint's folder: its generations, its lock, and the removal of files.

A save holds the lock, writes a data file and a manifest, syncs, and only then renames the manifest. Whenever it is killed,
the newest manifest and all files it names are complete. Files that no kept manifest names are removed last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Iterator

from fbuf._concurrency.parallel import BackgroundCall
from fbuf._formats.checkpoint import filesystem
from fbuf._formats.checkpoint.data_file import OpenFile, read_plain
from fbuf._formats.checkpoint.manifest import INVALID, MAX_BYTES, Manifest, VersionError, decode, encode
from fbuf._host.io.file import annotate_os_error
from fbuf._host.io.lock import NO_LOCKS, FileLock
from fbuf._host.types import StoreCorrupted

DAMAGED_SAVES: set[str] = set()
"""Ids of saves in which this process found damage. No save builds on one, or counts it among those to keep."""
INTACT_SAVES: set[str] = set()
"""Those of them whose every block proved right when it was read again. No save removes one."""
UNSYNCED_SAVES: set[str] = set()
"""Ids of saves whose data file failed to sync later. A second sync proves nothing: the system may have dropped the pages,
while reads still return them. No save builds on such a file."""
_manifest_cache: dict[str, tuple[bytes, Manifest]] = {}
"""By path: the manifest that this process wrote last, as bytes and parsed, for a file with the same bytes."""
_MAX_CACHED_BYTES, _MAX_CACHED = 1 << 20, 4


class Folder:
    """The folder of a checkpoint."""

    def __init__(self, path: filesystem.Path, disk: filesystem.Disk) -> None:
        self.path, self.disk = os.path.realpath(os.fspath(path)), disk
        self._lock: FileLock | None = None

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def names(self, exists: bool = False) -> list[str]:
        """Return the names in the folder; none without a folder, unless it `exists`. Raises OSError."""
        try:
            with annotate_os_error("list", self.file("")):
                return sorted(filesystem.retried(lambda: self.disk.listdir(self.path)))
        except FileNotFoundError:
            if exists:
                raise
            return []

    def generations(self) -> list[int]:
        """Return the generations that have a manifest, newest first."""
        return filesystem.find_generations(self.names())

    def _remember(self, text: bytes, manifest: Manifest) -> None:
        """Cache a manifest that is about to be written, so that the next save need not parse it."""
        _manifest_cache.pop(self.path, None)
        if len(text) <= _MAX_CACHED_BYTES:
            _manifest_cache[self.path] = text, manifest
        while len(_manifest_cache) > _MAX_CACHED:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread did
                del _manifest_cache[next(iter(_manifest_cache))]

    def manifest(self, generation: int, known: bool = False, partial: bool = False) -> Manifest:
        """Read a manifest; `known` allows the cached one. Raises StoreCorrupted, VersionError, OSError."""
        path = self.file((filesystem.partial_name if partial else filesystem.manifest_name)(generation))
        text = read_plain(self.disk, path, MAX_BYTES)
        cached, manifest = _manifest_cache.get(self.path, (b"", None)) if known else (b"", None)
        if manifest is not None and manifest.generation == generation and cached == text:
            return manifest
        try:
            return decode(text, generation)
        except VersionError as error:
            raise VersionError(f"fbuf: {path} {error}.") from None
        except INVALID as error:
            raise StoreCorrupted(f"{path} is damaged ({type(error).__name__}): {str(error)[:200]}") from None

    def is_complete(self, manifest: Manifest, blocks: bool = False) -> bool:
        """Return whether all files of a manifest are there with the right sizes and headers; and `blocks`, if they are read.

        Raises:
          OSError: that cannot be told.
        """
        with contextlib.ExitStack() as stack:
            try:
                files = [OpenFile(self.disk, self.path, entry) for entry in manifest.files]
            except StoreCorrupted:
                return False
            for file in files:
                stack.callback(file.close)
            return not blocks or all(
                files[file].crc(offset, size) == crc or files[file].crc(offset, size) == crc
                for array in manifest.arrays.values()
                for file, offset, size, crc in zip(
                    *(a.tolist() for a in (array.file, array.offset, array.layout.sizes, array.crc)), strict=True
                )
            )

    def _is_kept_apart(self, manifest: Manifest) -> bool:
        """Return whether a save that was found damaged proves intact when it is read again. Raises OSError."""
        if manifest.save not in INTACT_SAVES and self.is_complete(manifest, blocks=True):
            INTACT_SAVES.add(manifest.save)
        return manifest.save in INTACT_SAVES

    def create(self, sync: bool) -> None:
        """Create the folder and its parents."""
        missing, path = [], self.path
        while not self.disk.isdir(path) and path != os.path.dirname(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with annotate_os_error("make", os.path.join(path, "")), contextlib.suppress(FileExistsError):
                self.disk.mkdir(path)
            if sync:
                filesystem.sync_folder(self.disk, os.path.dirname(path))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. Raises BlockingIOError: another save holds it; FileExistsError: a live store is in the folder."""
        path = self.file(filesystem.LOCK)

        def opened() -> int:
            with annotate_os_error("open", path, filesystem.SAVE_ELSEWHERE):
                return self.disk.open(path, os.O_RDWR | os.O_CREAT)

        what, fix = f"fbuf.save: the checkpoint at {self.path}", "Wait for that save, or give another path."
        try:
            self._lock = FileLock(what, opened, fix, self.disk.close)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"fbuf.save: the file system of {self.path} has no locks; concurrent saves there would corrupt each other.",
                RuntimeWarning,
                stacklevel=2,
            )
        try:
            if "manifest.json" in self.names(exists=True):
                raise FileExistsError(errno.EEXIST, f"fbuf.save: {self.path} holds a live store. Use another.")
            yield
        finally:
            lock, self._lock = self._lock, None
            if lock is not None:
                lock.release()

    def check_locked(self) -> None:
        """Raise FileNotFoundError if the folder was removed or replaced since it was locked. Raises OSError."""
        if self._lock is None:  # another process of the save holds it, or the file system has no locks
            return
        with annotate_os_error("look at", self.file(filesystem.LOCK), filesystem.SAVE_ELSEWHERE):
            is_there = self.disk.is_at(self._lock, self.file(filesystem.LOCK))
        if not is_there:
            raise FileNotFoundError(
                errno.ENOENT,
                f"fbuf.save: {self.path} was removed or replaced during the save, and what is there was not changed. Leave the "
                f"folder in place while a save runs.",
            )

    def next_number(self, many: int = 1) -> int:
        """Return the first of the next `many` numbers. Raises FileExistsError: a foreign file has the largest number."""
        number = filesystem.largest_number(self.names(exists=True)) + 1
        if number > filesystem.MAX_GENERATION - many + 1:  # its name would not be recognised
            raise FileExistsError(errno.EEXIST, f"fbuf.save: {self.path} has no number left. Use another.")
        return number

    def write_partial(self, manifest: Manifest) -> int:
        """Write a manifest that is a part of another; return its bytes."""
        text = encode(manifest)
        filesystem.write_partial(
            self.disk, self.file(filesystem.partial_name(manifest.generation)), text, False, filesystem.SAVE_ELSEWHERE
        )
        return len(text)

    def publish(self, manifest: Manifest, sync: bool, named: bool, data: BackgroundCall | None = None) -> int:
        """Write and rename a manifest: from then on its generation is the newest. Return its bytes.

        Args:
          named: Whether the names of all its data files are already synced.
          data: What syncs the data file meanwhile.
        """
        generation, text = manifest.generation, encode(manifest)
        self.check_locked()
        self._remember(text, manifest)
        new, path = self.file(filesystem.partial_name(generation)), self.file(filesystem.manifest_name(generation))
        filesystem.write_partial(self.disk, new, text, sync, filesystem.SAVE_ELSEWHERE)
        if sync and not named:
            filesystem.sync_folder(self.disk, self.path)  # the data file's name, before a manifest names it
        if data is not None:
            data.result()
        self.check_locked()
        with annotate_os_error("rename", new, filesystem.SAVE_ELSEWHERE):
            self.disk.rename(new, path)
        if sync:
            filesystem.sync_folder(self.disk, self.path)
        return len(text)

    def remove_partial(self, generation: int) -> None:
        """Remove an unfinished manifest."""
        with contextlib.suppress(OSError):
            self.check_locked()
            self.disk.unlink(self.file(filesystem.partial_name(generation)))

    def remove_generation(self, generation: int, data: bool = True) -> None:
        """Remove the files of a failed save, the manifest first; the data file only if the save made it."""
        data_name = (filesystem.data_name,) if data else ()
        for named in (filesystem.manifest_name, filesystem.partial_name, *data_name):
            with contextlib.suppress(OSError):
                self.check_locked()
                self.disk.unlink(self.file(named(generation)))

    def remove_leftovers(self) -> None:
        """Remove the files of killed saves, which may fill the disk."""
        names = self.names(exists=True)
        newest = max(filesystem.find_generations(names), default=0)
        left = [
            n
            for n in names
            if filesystem.is_partial_name(n) or (filesystem.is_data_name(n) and n > filesystem.data_name(newest))
        ]
        self._remove(left)

    def _manifest_again(self, generation: int) -> Manifest:
        """Read a manifest, twice if it is damaged. Raises as `manifest`."""
        try:
            return self.manifest(generation)
        except StoreCorrupted:
            return self.manifest(generation)

    def prune(self, latest: Manifest, before: Manifest | None, keep: int) -> None:
        """Remove all but the latest generation and the newest other complete ones, `keep` in all.

        A generation that this process found damaged is read again: if that finds no damage, it stays besides those.

        Args:
          before: A generation known to be complete.
        Raises:
          OSError, VersionError: a generation cannot be read; nothing was removed.
        """
        names = self.names(exists=True)
        kept, apart = [latest], list[Manifest]()
        for generation in filesystem.find_generations(names):
            if len(kept) >= keep:
                break
            if generation != latest.generation:
                if before is not None and before.generation == generation:
                    kept.append(before)
                    continue
                try:
                    manifest = self._manifest_again(generation)
                    if manifest.save not in DAMAGED_SAVES:
                        kept += [manifest] if self.is_complete(manifest) else []
                    elif self._is_kept_apart(manifest):
                        apart.append(manifest)
                except StoreCorrupted:
                    continue
        kept += apart
        manifests = {filesystem.manifest_name(manifest.generation) for manifest in kept}
        named = {entry.name for manifest in kept for entry in manifest.files}
        old = [
            filesystem.manifest_name(g)
            for g in filesystem.find_generations(names)
            if filesystem.manifest_name(g) not in manifests
        ]
        data = [name for name in names if filesystem.is_data_name(name) and name not in named]
        self._remove([*reversed(old), *data])

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self.check_locked()
            try:
                with annotate_os_error("remove", self.file(name)):
                    self.disk.unlink(self.file(name))
            except FileNotFoundError:
                pass
            except OSError as error:
                warnings.warn(f"{error} The next save tries again.", RuntimeWarning, stacklevel=2)
