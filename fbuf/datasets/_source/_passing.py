"""A file's bytes on their way from a source to whoever parses them: counted, shown, and checked at their end."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from fbuf.datasets._source._digest import Digest
from fbuf.datasets._source._entry import ByteStream, Entry, Progress, Source


class Bytes(Protocol):
    """What is parsed."""

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end, and all was as it should be."""

    def close(self) -> None:
        """Ends it; again does nothing."""


class Passing:
    """The bytes of `entry` from its first on. Failed connections are made again below it, so it needs no disk.

    Raises (from `read`):
      SourceError: they cannot be had. SourceChanged: another file took the name on the way.
      FileCorrupted: at the end, the size or hash is not the listed one.
    """

    def __init__(self, source: Source, entry: Entry, progress: Progress | None = None) -> None:
        self._stream: ByteStream = source.stream(entry)
        self._digest: Digest | None = Digest(entry)
        self._progress = progress

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end, and all was as it should be."""
        data = self._stream.read(size)
        if self._digest is not None:
            if data:
                self._digest.update(data)
            else:
                digest, self._digest = self._digest, None
                digest.check()
        if data and self._progress is not None:
            self._progress(self._stream.position, self._stream.total)
        return data

    def close(self) -> None:
        """Ends it; again does nothing."""
        self._digest = None
        self._stream.close()

    def __enter__(self) -> Passing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
