"""A folder on this machine, or on a disk that it mounts, as a source: names are paths below it.

Links are followed: the folder is the user's own, and large files often lie on another disk. Only plain files are
listed, and of those only what can be a name: the others are not of a data set.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import SourceChanged, SourceError
from fbuf.datasets._source._names import check_name, is_name

_MOST_DEPTH = 16


class FileStream:
    """The bytes of a file from `start` on. Raises SourceError."""

    def __init__(self, path: str, start: int = 0) -> None:
        self._path, self._fd = path, -1
        self.position = start
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._fd)
        except OSError as error:
            self.close()
            raise SourceError(f"{path}: cannot be opened: {error.strerror}.") from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise SourceError(f"{path}: is no plain file.")
        self.total: int | None = status.st_size
        self.validator: str | None = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end. Raises SourceError."""
        if self._fd < 0:
            return b""
        try:
            data = os.pread(self._fd, size, self.position)
        except OSError as error:
            raise SourceError(f"{self._path}: cannot be read at byte {self.position}: {error.strerror}.") from error
        self.position += len(data)
        return data

    def close(self) -> None:
        """Gives it back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


@dataclass(frozen=True)
class Folder:
    """The files below one folder.

    Args:
      root: Its path.
    """

    root: str

    def files(self, prefix: str = "") -> list[Entry]:
        """All files whose names begin with `prefix`, by name. Raises SourceError: the folder is not there."""
        if not os.path.isdir(self.root):
            raise SourceError(f"{self.root}: there is no such folder. source= takes the one that holds the files.")
        above = prefix[: prefix.rfind("/") + 1]
        if above:
            check_name(above[:-1], self.root)
        if not os.path.isdir(os.path.join(self.root, above)):
            return []
        found = self._below(above, 0, frozenset())
        return sorted((entry for entry in found if entry.name.startswith(prefix)), key=lambda entry: entry.name)

    def stream(self, entry: Entry, start: int = 0, validator: str | None = None) -> FileStream:
        """The bytes of a file from `start` on."""
        stream = FileStream(entry.address, start)
        if validator is not None and stream.validator != validator:
            stream.close()
            raise SourceChanged(f"{entry.address}: was written again since its first {start} bytes were read.")
        return stream

    def _below(self, folder: str, depth: int, passed: frozenset[tuple[int, int]]) -> Iterator[Entry]:
        path = os.path.join(self.root, folder)
        try:
            status = os.stat(path)
            items = list(os.scandir(path))
        except OSError as error:
            raise SourceError(f"{path}: cannot be listed: {error.strerror}.") from error
        here = (status.st_dev, status.st_ino)
        if here in passed or depth > _MOST_DEPTH:  # a link that leads back
            return
        for item in items:
            name = folder + item.name
            if item.is_dir():
                yield from self._below(name + "/", depth + 1, passed | {here})
            elif item.is_file() and not item.name.endswith((".part", ".part.json")):
                if is_name(name):
                    yield Entry(name, item.path, item.stat().st_size)
