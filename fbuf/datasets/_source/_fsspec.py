"""Whatever fsspec has a name for (s3, hf, sftp, ...), where it is installed; its own packages for each are the user's business.

fsspec knows no common form of hash, so what is damaged is noticed by gzip's own checksum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import SourceError
from fbuf.datasets._source._names import check_name, is_folder


class OpenedStream:
    """The bytes of an opened file of fsspec from `start` on."""

    def __init__(self, file: Any, address: str, start: int, total: int | None) -> None:
        self._file, self._address = file, address
        self.position, self.total = start, total
        self.validator: str | None = None

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end. Raises SourceError."""
        try:
            data = bytes(self._file.read(size))
        except Exception as error:  # each file system has its own kinds
            raise SourceError(f"{self._address}: cannot be read at byte {self.position}: {error!r}.") from error
        self.position += len(data)
        return data

    def close(self) -> None:
        """Gives it back."""
        self._file.close()


@dataclass(frozen=True)
class Fsspec:
    """The files below one URL.

    Args:
      base: With a scheme that fsspec knows.
    """

    base: str

    def files(self, prefix: str = "") -> list[Entry]:
        """All files whose names begin with `prefix`, by name. Raises SourceError, ImportError."""
        system, root = self._system()
        above = prefix[: prefix.rfind("/")] if "/" in prefix else ""
        if above:
            check_name(above, self.base)
        folder = f"{root}/{above}" if above else root
        try:
            found = system.find(folder, detail=True) if system.exists(folder) else {}
        except Exception as error:
            raise SourceError(f"{self.base}: cannot be listed: {error!r}.") from error
        entries = []
        for path, info in found.items():
            name = path.removeprefix(root).lstrip("/")
            size = info.get("size")
            if name.startswith(prefix) and not is_folder(name):
                entries.append(Entry(check_name(name, self.base), path, size if type(size) is int else None))
        return sorted(entries, key=lambda entry: entry.name)

    def stream(self, entry: Entry, start: int = 0, validator: str | None = None) -> OpenedStream:
        """The bytes of a file from `start` on."""
        system, _ = self._system()
        try:
            file = system.open(entry.address, "rb")
            if start:
                file.seek(start)
        except Exception as error:
            raise SourceError(f"{self.base}, {entry.address}: cannot be opened: {error!r}.") from error
        return OpenedStream(file, entry.address, start, entry.size)

    def _system(self) -> tuple[Any, str]:
        scheme = self.base.split("://", 1)[0]
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ImportError(
                f"source='{self.base}': fsspec reads '{scheme}://' and is not installed; expected it, an http(s):// "
                f"address or a folder. Install it: pip install fsspec."
            ) from None
        try:
            system, root = url_to_fs(self.base)
        except ImportError as error:  # fsspec names the package
            raise ImportError(f"source='{self.base}': {error}") from error
        except Exception as error:
            raise SourceError(f"{self.base}: fsspec does not know such an address: {error}.") from error
        return system, str(root).rstrip("/")
