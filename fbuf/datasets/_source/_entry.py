"""A file of a source, and what is known of it before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Progress = Callable[[int, int | None], None]
"""Called with the bytes there are so far and those there will be (None: not known), after each block."""


@dataclass(frozen=True)
class Entry:
    """One file, as it was listed. A value: it can be sent to another process.

    Attributes:
      name: Relative path, checked: no part leads out of a folder.
      address: Where the source reads it from: a URL or a path, made by the source and not by the listing.
      size: Bytes, as stored; None where the listing does not say.
      md5: 16 bytes, or None. `crc32c`: likewise.
      generation: What tells this file from a later one of the same name, or None.
    """

    name: str
    address: str
    size: int | None = None
    md5: bytes | None = None
    crc32c: int | None = None
    generation: str | None = None

    @property
    def identity(self) -> str | None:
        """Text that another file of the same name does not have; None: the listing says nothing that would tell them apart."""
        if self.generation is None and self.md5 is None and self.crc32c is None:
            return None
        md5 = "" if self.md5 is None else self.md5.hex()
        return f"{self.generation or ''}/{md5}/{'' if self.crc32c is None else self.crc32c}/{self.size}"


class ByteStream(Protocol):
    """The bytes of one file in order, from some byte on."""

    @property
    def position(self) -> int:
        """The next byte's place in the file."""

    @property
    def total(self) -> int | None:
        """Bytes of the whole file; None while that is not known."""

    @property
    def validator(self) -> str | None:
        """What the answer said to tell this file from another of its name (an ETag); None: nothing."""

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size` of them; none: the end. Raises SourceError."""

    def close(self) -> None:
        """Ends it; again does nothing."""


class Source(Protocol):
    """Where files come from. A value: it can be sent to another process."""

    def files(self, prefix: str = "") -> list[Entry]:
        """The files whose names begin with `prefix`, by name. Raises SourceError."""

    def stream(self, entry: Entry, start: int = 0, validator: str | None = None) -> ByteStream:
        """The bytes of a file from `start` on.

        Args:
          validator: Of the stream that gave the bytes before `start`.
        Raises:
          SourceError: it cannot be had. SourceChanged: it is not the file whose first bytes were read.
        """
