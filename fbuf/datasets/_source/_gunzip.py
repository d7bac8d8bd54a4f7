"""gzip as a stream: members one after the other, each one's checksum and length checked, nothing else tolerated.

`zlib.decompressobj` checks both itself, in C; in pieces of 256 KiB it is faster than `gzip.open` (which computes the
checksum in a second pass, over blocks of 8 KiB) and never holds more than one piece. isal's, which the extra `datasets`
brings, does the same faster still, and is used where it is: inflating is a good part of what making a data set costs.

A bomb has no bite here: at most `size` bytes come of a call, and who reads stops at the length that was announced. Members
without content are bounded by the file's own length.
"""

from __future__ import annotations

import zlib
from typing import Any

from fbuf.datasets._source._errors import FileCorrupted
from fbuf.datasets._source._passing import Bytes

BLOCK = 1 << 18
"""Bytes of output that are fastest: they stay in the processor's cache."""
_INPUT = 1 << 16


def _inflating() -> tuple[Any, Any]:
    """What makes a decompressor, and what it raises."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompressobj, zlib.error
    return isal_zlib.decompressobj, isal_zlib.error


class Gunzip:
    """The content of a gzip stream.

    Args:
      source: Its bytes.
      file: For messages.
      head: Bytes that were read from `source` already.
    """

    def __init__(self, source: Bytes, file: str, head: bytes = b"") -> None:
        self._source, self._file = source, file
        self._input, self._taken = head, len(head)  # what waits; bytes of the file read so far
        self._make, self._broken = _inflating()
        self._member = self._make(wbits=31)
        self._fed = self._ended = False
        self.position = 0

    @property
    def at(self) -> int:
        """The byte of the file that comes next."""
        return self._taken - len(self._input)

    def read(self, size: int) -> bytes:
        """The next bytes of the content, at most `size`; none: the end, and all was as it should be. Raises FileCorrupted."""
        while not self._ended:
            if not self._input:
                self._fill()
                if not self._input:
                    self._end()
                    break
            if not self._fed and self._input[:1] != b"\x1f":
                raise self._error(f"has {self._input[:4].hex()} after a member; expected another member, or the end")
            try:
                data = self._member.decompress(self._input, max(size, 1))
            except self._broken as error:
                raise self._error(f"does not decompress ({error})") from error
            self._fed = True
            if self._member.eof:
                self._input = self._member.unused_data
                self._member, self._fed = self._make(wbits=31), False
            else:
                self._input = self._member.unconsumed_tail
            if data:
                self.position += len(data)
                return data
        return b""

    def close(self) -> None:
        """Ends it; again does nothing."""
        self._source.close()

    def _fill(self) -> None:
        self._input = self._source.read(_INPUT)
        self._taken += len(self._input)

    def _end(self) -> None:
        self._ended = True
        if self._fed or not self._taken:
            raise self._error("ends within a gzip member; expected its checksum. It was cut short")

    def _error(self, what: str) -> FileCorrupted:
        return FileCorrupted(
            f"{self._file}: byte {self.at} (byte {self.position} of its content): {what}.", file=self._file, at=self.at
        )


class Plain:
    """Content that is not compressed, behind the same two attributes."""

    def __init__(self, source: Bytes, file: str, head: bytes = b"") -> None:
        self._source, self._head = source, head
        self.position = 0

    @property
    def at(self) -> int:
        """The byte of the file that comes next."""
        return self.position

    def read(self, size: int) -> bytes:
        """The next bytes, at most `size`; none: the end."""
        data, self._head = (self._head[:size], self._head[size:]) if self._head else (self._source.read(size), b"")
        self.position += len(data)
        return data

    def close(self) -> None:
        """Ends it; again does nothing."""
        self._source.close()
