"""Changed rows on disk: a log of what `Store.patch` was given, from which `Patches` is made again.

One record a call, with a checksum, written before the rows can be seen. Of a row that was changed several times the last
counts. The log is written anew, with what is still held, when most of it is of no use.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterable, Mapping

from fbuf._host.arrays import Array, StoreCorrupted
from fbuf._host.files import File
from fbuf._host.folder import Folder, replace
from fbuf._host.patches import PATCH, Patch, Patches

_RECORD = struct.Struct("<4sII")  # magic, bytes of the body, its crc
_MAGIC = b"fbp1"
_PATCH = struct.Struct("<QIQI")  # number, lane, count, values
_VALUE = struct.Struct("<II")  # column, bytes
_LEAST = 1 << 20


class ChangeLog:
    """The log of a store, in the file `changes` of its folder."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.file("changes")
        self._file = File(self._path, 0 if folder.fresh else None)
        self._end = 0

    def append(self, first: int, made: Iterable[Patch]) -> None:
        """Writes patches that are to be numbered from `first` on. On OSError it is as if nothing was."""
        record = _record(dict(enumerate(made, first)))
        try:
            self._file.write(record, self._end)
        except OSError:
            self._file.size = self._end
            try:
                self._file.empty(self._end)
            except OSError:
                pass  # the next record overwrites it, and a part of one is none
            raise
        self._end += len(record)

    def tidy(self, patches: Patches) -> None:
        """Writes the log anew if most of it is of no use, and that can be done."""
        if self._end < max(_LEAST, 4 * patches.nbytes):
            return
        with contextlib.suppress(OSError):
            self.write(patches)

    def write(self, patches: Patches) -> None:
        """Writes the log anew. Raises OSError: it is as it was."""
        record = _record({ticket & ~PATCH: patch for ticket, patch in patches.held.items()})
        replace(self._path, lambda file: file.write(record, 0), len(record))
        self._file = File(self._path)
        self._end = len(record)

    def load(self, patches: Patches, low: Array, high: Array, columns: int) -> None:
        """The changed rows of lanes that hold rows `low[e]` to `high[e] - 1`: the last change of each."""
        text, at = self._file.read(0, self._file.size), 0
        newest: dict[tuple[int, int], tuple[int, Patch]] = {}
        made = 0
        while at + _RECORD.size <= len(text):
            magic, size, crc = _RECORD.unpack_from(text, at)
            body = text[at + _RECORD.size : at + _RECORD.size + size]
            if magic != _MAGIC or (len(body) == size and zlib.crc32(body) != crc):
                raise StoreCorrupted(
                    f"Buffer.resume: {self._path} holds something else at byte {at}; expected changed rows. Its bytes were "
                    f"damaged: start a new store at another path."
                )
            if len(body) < size:  # the process ended there
                break
            for number, patch in _read(body).items():
                made = max(made, number)
                if patch.lane < len(low) and low[patch.lane] <= patch.count < high[patch.lane]:
                    newest[patch.lane, patch.count] = number, patch
            at += _RECORD.size + size
        self._end = at
        for number, patch in newest.values():
            if all(0 <= column < columns for column in patch.values):
                patches.insert(PATCH | number, patch)
        patches.resume(made)


def _record(made: Mapping[int, Patch]) -> bytes:
    body = b"".join(
        _PATCH.pack(number, patch.lane, patch.count, len(patch.values))
        + b"".join(_VALUE.pack(column, len(value)) + value for column, value in patch.values.items())
        for number, patch in sorted(made.items())
    )
    return _RECORD.pack(_MAGIC, len(body), zlib.crc32(body)) + body


def _read(body: bytes) -> dict[int, Patch]:
    made: dict[int, Patch] = {}
    at = 0
    while at < len(body):
        number, lane, count, values = _PATCH.unpack_from(body, at)
        at += _PATCH.size
        own = {}
        for _ in range(values):
            column, size = _VALUE.unpack_from(body, at)
            own[column] = body[at + _VALUE.size : at + _VALUE.size + size]
            at += _VALUE.size + size
        made[number] = Patch(lane, count, own)
    return made
