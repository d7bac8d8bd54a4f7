"""The directory of a store in files: who may use it, what it says of the store, and how many rows count.

`manifest.json` describes the store and is written last when a store is made. `head` counts the rows of each lane, in two
places written in turn, each with a sequence number and a checksum: one is intact whenever the process is killed. It is
written after the rows it counts. The system holds `lock` while the store is open. The store's own random number is part of
every checksum, so files of two stores are never confused. Written rows outlive the process; only `flush` protects them from
a power failure, after which invalid rows are found (`raw_file.RowChecksums`) and dropped (`factory`). A file that the last
`flush` waited for and that is no longer used is removed by the next one (`retire`): what replaced it may not be on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fbuf._host.io.file import File, annotate_os_error, exists, unlink
from fbuf._host.io.lock import FileLock, lock_path
from fbuf._host.types import Array, StoreCorrupted, damaged_file

VERSION = 3
RING, CHUNKS, NOTHING = b"r", b"c", b"n"
"""How a column is kept: as it is, encoded, or not at all (rows of 0 bytes)."""
_OURS = re.compile(
    r"lock|head|changes|changes\.(new|old)|manifest\.json|manifest\.json\.new|"
    r"column[0-9]+\.(rows|sums|open|segment-[0-9]{8,10}|dictionary-[0-9a-f]{16}(\.new)?)"
)
_BLOCK = 1 << 20  # bytes
_MAX_MANIFEST = 1 << 24  # bytes
_MAX_COUNT = 1 << 62
_FOLDERS = "Give the store a folder of its own."
_rollbacks = threading.local()
"""Of a thread: the paths that may be rolled back, each with the folders that the thread made there."""


def is_store_name(name: str) -> bool:
    """Return whether a name is that of a store's file."""
    return _OURS.fullmatch(name) is not None


class Folder:
    """A directory held by one store of this process.

    Args:
      call: For messages, `"Memmap"`.
      path: The folder; None: a temporary one, removed when nothing refers to this any more, and at exit.
      identity: What the store is, as JSON: `lanes`, `length`, `slack`, and `columns` with `name`, `shape`, `dtype`, `codec`.
      resume: Open the existing store; otherwise there must be none.
      verify: Check every byte when a store is opened, and resume with the intact rows; otherwise each row is checked when it
        is read first, and a damaged one is an error.
      sync: Seconds after which a write waits for the disk; None: only `flush` does.
    Raises:
      FileExistsError: there is a store already, or something else.
      FileNotFoundError: there is none to resume.
      BlockingIOError: another store holds the folder.
      ValueError: The existing store differs from `identity`.
      StoreCorrupted: Its manifest or head is damaged, or one of its files is not a plain file.
      OSError: the folder or a file cannot be made.
    """

    def __init__(
        self,
        call: str,
        path: str | None,
        identity: Mapping[str, Any],
        *,
        resume: bool = False,
        verify: bool = True,
        sync: float | None = None,
    ) -> None:
        self.fresh = not resume
        self.verify = verify
        self.sync = sync
        self.seed = 0  # 64 bits, the store's own
        self.changes = 0  # changed rows, ever
        self.temporary = path is None
        self.identity = dict(identity)
        self._sequence = 0
        lanes, columns = int(identity["lanes"]), list(identity["columns"])
        self.count: Array = np.zeros(lanes, np.int64)
        self.first: Array = np.zeros(lanes, np.int64)  # rows of each lane before this one are not there
        self.flushed: Array = np.zeros(lanes, np.int64)  # rows of each lane when all was on the disk last
        self._synced: set[str] = set()  # names of files that the last flush waited for
        self._retired: list[str] = []  # those of them that the next one removes
        self._unsynced: set[str] = set()  # names of files whose last sync, or close, failed
        self.kinds = b"".join(_kind(column) for column in columns)
        if path is None:
            with annotate_os_error("make a folder in", os.path.join(tempfile.gettempdir(), "fbuf")):
                path = tempfile.mkdtemp(prefix="fbuf-")
        self.path = os.path.abspath(path)
        if resume and not exists(self.file("manifest.json")):
            raise FileNotFoundError(errno.ENOENT, f"Buffer.resume: no store at {self.path}. Use buffer.init.")
        self._created = not exists(self.path)
        self._is_ours = False  # whether everything in the folder was written by this object
        self.lock = self._locked(call)
        self._end = weakref.finalize(self, _release, self.lock, self.path if self.temporary else None)
        self._end.atexit = self.temporary  # a write may be under way: the system unlocks what is left
        try:
            if resume:
                self._check_plain()
                self._check()
                self._head = File(self.file("head"))
                self._load()
                self._synced = set(self.files(""))  # an earlier process may have waited for each
            else:
                self._make(call)
        except BaseException:
            self.discard()
            raise

    def _locked(self, call: str) -> FileLock:
        """Make the folder if it is missing, and lock it."""
        try:
            with annotate_os_error("make", self.file("lock")):
                os.makedirs(self.path, exist_ok=True)
            if self.fresh:
                self._refuse_foreign_files(call)
            fix = "Drop every state of it (or close it: fbuf.stores()), or give another path."
            return lock_path(f"{call}: the store at {self.path}", self.file("lock"), fix)
        except BaseException:
            if self.temporary:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _make(self, call: str) -> None:
        """Begin a store that has no rows."""
        self._clean(call)
        self._is_ours = True
        for where, made in getattr(_rollbacks, "open", ()):
            if where == self.path:
                self.lock.share()
                made.append(self)
        self.seed = secrets.randbits(64)
        stride = -(-len(self._encoded(self.kinds, self.count)) // 4096) * 4096
        self._head = File(self.file("head"), 2 * stride)
        self._head.write(bytes(2 * stride), 0)  # its blocks are there from now on
        self.save(self.kinds, self.count)

    def file(self, name: str) -> str:
        """Return the path of a file."""
        return os.path.join(self.path, name)

    def files(self, prefix: str) -> list[str]:
        """Return the names of the files that begin with `prefix`, sorted."""
        with annotate_os_error("list", self.file(prefix)):
            return sorted(name for name in os.listdir(self.path) if name.startswith(prefix))

    def retire(self, name: str) -> None:
        """Remove a file: at once, or in the next `flush` if the last one waited for it."""
        if name in self._synced:
            self._synced.remove(name)
            self._retired.append(name)
        else:
            unlink(self.file(name))

    def replace(self, name: str, write: Callable[[File], None], size: int) -> File:
        """Replace a file atomically, and return it; `flush` removes the one before, now `<name>.old`, if the last flush waited
        for it.
        """
        old = f"{name}.old" if name in self._synced else None
        file = replace(self.file(name), write, size, None if old is None else self.file(old))
        if old is not None:
            self._synced.remove(name)
            self._retired.append(old)
        return file

    def distrust(self, name: str) -> None:
        """Let the next `flush` write a file again: the system may have lost its bytes."""
        self._unsynced.add(name)

    def retire_chunks(self, name: str) -> None:
        """Remove the files of an encoded column that is now stored raw."""
        for file in self.files(f"{name}."):
            if not file.endswith((".rows", ".sums")) and file not in self._retired:
                self.retire(file)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the files on disk, without holes."""
        return self.size("")

    def size(self, prefix: str) -> int:
        """Return the bytes of the files whose names begin with `prefix`."""
        total = 0
        for name in self.files(prefix) if exists(self.path) else ():
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(self.file(name), follow_symlinks=False).st_blocks * 512
        return total

    def publish(self) -> None:
        """Write the manifest of a new store, atomically."""
        known = {"format": "fbuf store", "version": VERSION, "id": f"{self.seed:016x}"}
        text = json.dumps({**known, **self.identity}, indent=1)
        replace(self.file("manifest.json"), lambda file: file.write(text.encode(), 0), len(text.encode())).close()

    def save(self, kinds: bytes, count: Array, changes: int | None = None) -> None:
        """Count the rows written and updated. On OSError the counts stay as they were."""
        self._sequence += 1
        before, self.changes = self.changes, self.changes if changes is None else changes
        try:
            self._head.write(self._encoded(kinds, count), self._sequence % 2 * self._head.size // 2)
        except BaseException:
            self._sequence -= 1
            self.changes = before
            raise
        self.kinds, self.count = kinds, count.copy()

    def _encoded(self, kinds: bytes, count: Array) -> bytes:
        body = struct.pack("<QQ", self._sequence, self.changes) + kinds
        body += b"".join(np.asarray(array, "<i8").tobytes() for array in (count, self.first, self.flushed))
        return body + struct.pack("<I", self.crc(body))

    def crc(self, data: bytes) -> int:
        """Return the checksum of bytes that belong to this store."""
        return zlib.crc32(data, self.seed & 0xFFFFFFFF)

    def flush(self) -> None:
        """Wait until everything written is on disk, then remove what was retired. Raises OSError."""
        names = [name for name in self.files("") if name not in self._retired]
        self.wait_for(names)
        before, self.flushed = self.flushed, self.count.copy()
        try:
            self.save(self.kinds, self.count)
        except BaseException:
            self.flushed = before
            raise
        self._head.sync()
        for name in self._retired:
            unlink(self.file(name))
        self._synced, self._retired = set(names), []

    def tidy(self) -> None:
        """Flush if a file is left that only the flush of an earlier process needs."""
        if self._retired:
            self.flush()

    @property
    def is_flushed(self) -> bool:
        """Return whether a flush waited for anything."""
        return bool(self._synced)

    def wait_for(self, names: Sequence[str]) -> None:
        """Wait until files, and the names of all, are on disk. Raises OSError."""
        # The rows of open chunks replace rows that the head counts until it is on the disk; it counts all others.
        for name in sorted(filter(is_store_name, names), key=lambda name: (name.endswith(".open"), name == "head")):
            if name in self._unsynced:
                rewrite(self.file(name))
            self._unsynced.add(name)
            self._flush(self.file(name))
            self._unsynced.remove(name)
        self._flush(self.path)

    def _flush(self, path: str) -> None:
        with annotate_os_error("flush", path):
            try:
                fd = os.open(
                    path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if path == self.path else os.O_NOFOLLOW)
                )
            except FileNotFoundError:  # removed in the meantime
                return
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def _check_plain(self) -> None:
        """Raise StoreCorrupted if a name of a store's file is that of anything but a plain file."""
        for name in filter(is_store_name, self.files("")):
            with annotate_os_error("look at", self.file(name)):
                is_plain = stat.S_ISREG(os.lstat(self.file(name)).st_mode)
            if not is_plain:
                raise StoreCorrupted(
                    f"Buffer.resume: {self.file(name)} is not a plain file; expected one. Remove it, and resume again."
                )

    def _load(self) -> None:
        size, columns = len(self._encoded(self.kinds, self.count)), len(self.kinds)
        best = b""
        for place in (0, 1, 0, 1):  # again: only lasting damage counts
            text = self._head.read(place * self._head.size // 2, size)
            body = text[:-4]
            if len(text) == size and struct.pack("<I", self.crc(body)) == text[-4:] and any(body[:8]):
                best = max(best, body, key=lambda b: int.from_bytes(b[:8], "little"))
        if not best:
            raise damaged_file(f"{self._head.path} does not say how many rows there are", "one of its two places whole")
        self._sequence, self.changes = struct.unpack_from("<QQ", best)
        known, self.kinds = self.kinds, best[16 : 16 + columns]
        self.count, self.first, self.flushed = (
            np.frombuffer(best[16 + columns :], "<i8").astype(np.int64).reshape(3, -1)
        )
        pairs = zip(self.kinds, known, strict=True)
        right = all(kind == usual or bytes((kind, usual)) == RING + CHUNKS for kind, usual in pairs)
        right &= self.changes < _MAX_COUNT
        right &= bool(((0 <= self.first) & (self.first <= self.count) & (self.count < _MAX_COUNT)).all())
        if not right or not ((0 <= self.flushed) & (self.flushed <= self.count)).all():
            raise damaged_file(
                f"{self._head.path} holds impossible numbers of rows, updates or kinds of columns", "those of a store"
            )

    def _check(self) -> None:
        """Raise ValueError unless this is the expected store."""
        path = self.file("manifest.json")
        file = File(path)
        size = file.size
        text = file.read(0, min(size, _MAX_MANIFEST))
        file.close()
        try:
            if size > _MAX_MANIFEST:
                raise ValueError(f"{size} bytes, more than {_MAX_MANIFEST}")
            manifest = json.loads(text)
            version = manifest["version"]
            found = {key: manifest[key] for key in self.identity}
            columns = {column["name"]: column for column in found["columns"]}
            if manifest["format"] != "fbuf store":
                raise ValueError("of another format")
            self.seed = int(manifest["id"], 16) if version == VERSION else 0
            if not 0 <= self.seed < 1 << 64 or not all(isinstance(name, str) for name in columns):
                raise ValueError("an invalid id or name")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged_file(f"{path} is damaged ({error!r:.200})", "a manifest") from error
        if version != VERSION:
            raise ValueError(f"Buffer.resume: {path} is of version {version}, not {VERSION}. Use that release of fbuf.")
        expected = json.loads(json.dumps(self.identity))
        wanted = {column["name"]: column for column in expected.pop("columns")}
        settings = [("the store", key, found[key], value) for key, value in expected.items()]
        settings.append(("the store", "leaves", ", ".join(columns), ", ".join(wanted)))
        for name, column in wanted.items():
            old = columns.get(name, {})
            settings += [(f"leaf '{name}' of the store", key, old.get(key), value) for key, value in column.items()]
        for what, key, old, new in settings:
            if old != new:
                raise ValueError(f"Buffer.resume: {what} at {self.path} has {key} {old}; expected {new}.")

    def _refuse_foreign_files(self, call: str) -> list[str]:
        """Return the names in the folder. Raises FileExistsError if some are not those of a store."""
        names = self.files("")
        others = [name for name in names if not is_store_name(name)]
        if others:
            raise FileExistsError(
                errno.EEXIST, f"{call}: {self.path} holds other files ({others[0]}); expected none. {_FOLDERS}"
            )
        return names

    def _clean(self, call: str) -> None:
        """Remove what an unfinished store left behind. Raises FileExistsError if there is anything else."""
        names = self._refuse_foreign_files(call)
        if "manifest.json" in names:
            fix = "Use buffer.resume(example), or Replay(buffer, example, resume=True)."
            raise FileExistsError(errno.EEXIST, f"{call}: {self.path} has a store. {fix}")
        for name in names:
            if name != "lock":
                unlink(self.file(name))

    def check_held(self) -> None:
        """Raise FileNotFoundError if the folder was removed or replaced, or is held by the parent of this process."""
        if not self.lock.is_held:
            raise FileNotFoundError(
                errno.ENOENT, f"{self.path} is not held by this process. Make a store of its own here."
            )
        with annotate_os_error("look at", self.file("lock")):
            is_there = self.lock.is_at(self.file("lock"))
        if not is_there:
            raise FileNotFoundError(
                errno.ENOENT,
                f"{self.path} was removed or replaced while its store is open, and nothing was written. Save the rows that the "
                f"store holds with fbuf.save, or load the last checkpoint.",
            )

    def close(self) -> None:
        """Release the directory, and remove it if it is temporary. Closing twice is fine."""
        self._end()

    def discard(self) -> None:
        """Close, and remove the files of a store that this object made. Files of a resumed store stay."""
        if self._is_ours and not self.temporary:
            with contextlib.suppress(OSError):
                if self.lock.is_at(self.file("lock")):
                    names = set(filter(is_store_name, os.listdir(self.path))) - {"manifest.json", "lock"}
                    for name in ("manifest.json", *sorted(names), "lock"):  # last: then another store may be made here
                        unlink(self.file(name))
                    if self._created:
                        os.rmdir(self.path)
        self.close()


@contextlib.contextmanager
def rollback(path: str | None) -> Iterator[None]:
    """Remove the store that this thread makes at `path` in the `with` block if the block fails.

    The lock is held until then. Stores that others made there stay.
    """
    if path is None:
        yield
        return
    made: list[Folder] = []
    entry = os.path.abspath(os.path.expanduser(path)), made
    is_open = _rollbacks.__dict__.setdefault("open", [])
    is_open.append(entry)
    try:
        yield
    except BaseException:
        for folder in made:
            folder.discard()
        raise
    finally:
        is_open[:] = [other for other in is_open if other is not entry]
        for folder in made:
            folder.lock.release()


def replace(path: str, write: Callable[[File], None], size: int, old: str | None = None) -> File:
    """Replace a file atomically, and return it; with `old`, rename the one before to that."""
    new = f"{path}.new"
    file = File(new, size)
    try:
        write(file)
        with annotate_os_error("rename", new):
            if old is not None:
                os.replace(path, old)
            try:
                os.replace(new, path)
            except BaseException:
                if old is not None:
                    os.replace(old, path)
                raise
    except BaseException:
        file.close()
        unlink(new)
        raise
    file.path = path
    return file


def rewrite(path: str) -> None:
    """Write the bytes of a file again, if it exists: after a sync that failed, the system may count them as written."""
    with contextlib.suppress(FileNotFoundError):
        file = File(path)
        at = 0
        while at < file.size:
            try:
                at = os.lseek(file.fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nothing but a hole follows
                    raise
                break
            if not (data := file.read(at, _BLOCK)):
                break
            file.write(data, at)
            at += len(data)


def _kind(column: Mapping[str, Any]) -> bytes:
    if 0 in column["shape"]:
        return NOTHING
    return RING if column["codec"] is None else CHUNKS


def _release(lock: FileLock, path: str | None) -> None:
    """Release the directory. Runs in the garbage collector or at exit, so it takes no lock."""
    if path is not None and lock.is_held:  # a forked child does not hold it
        shutil.rmtree(path, ignore_errors=True)
    lock.release()
