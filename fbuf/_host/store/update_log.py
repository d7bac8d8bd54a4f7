"""Changed rows on disk: a log of what `Store.patch` was given, from which `Patches` is made again.

One record a call, with a checksum, written before the rows can be seen. Of a row that was changed several times the last
counts. The log is written anew, with what is still held, when most of it is of no use. How many changes there were ever is in
the folder's head, so that a log which ends early is noticed.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator, Mapping

from fbuf._host.io.directory import Folder, replace
from fbuf._host.io.file import File, existing
from fbuf._host.store.row_updates import PATCH, Patch, Patches
from fbuf._host.types import Array, StoreCorrupted

_RECORD = struct.Struct("<4sII")  # magic, bytes of the body, its crc
_MADE = struct.Struct("<Q")  # what the body begins with: changes made ever, up to this record
_MAGIC = b"fbp1"
_PATCH = struct.Struct("<QIQI")  # number, lane, count, values
_VALUE = struct.Struct("<II")  # column, bytes
_LEAST = 1 << 20


class ChangeLog:
    """The log of a store, in the file `changes` of its folder."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.file("changes")
        self._folder = folder
        self._file = File(self._path, 0) if folder.fresh else existing(self._path)
        self._end = 0

    @contextlib.contextmanager
    def appended(self, first: int, made: Iterable[Patch]) -> Iterator[None]:
        """Writes patches that are to be numbered from `first` on. If this or what follows fails, it is as if nothing was."""
        numbered = dict(enumerate(made, first))
        record = self._record(numbered, max(numbered, default=first - 1))
        try:
            self._file.write(record, self._end)
            yield
        except BaseException:
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
        record = self._record({ticket & ~PATCH: patch for ticket, patch in patches.held.items()}, patches.made)
        replace(self._path, lambda file: file.write(record, 0), len(record))
        self._file = File(self._path)
        self._end = len(record)

    def load(self, patches: Patches, low: Array, high: Array, columns: int) -> int:
        """The changed rows of lanes that hold rows `low[e]` to `high[e] - 1`: the last change of each.

        Returns:
          How many changes are lost.
        Raises:
          StoreCorrupted: some are, and the folder is not to go on with what is whole.
        """
        text, at = self._file.read(0, self._file.size), 0
        newest: dict[tuple[int, int], tuple[int, Patch]] = {}
        made, later = 0, False
        while at + _RECORD.size <= len(text):
            magic, size, crc = _RECORD.unpack_from(text, at)
            body = text[at + _RECORD.size : at + _RECORD.size + size]
            if magic != _MAGIC or len(body) < size or self._folder.crc(body) != crc:
                break  # the process ended there, or it was damaged
            made = max(made, *_MADE.unpack_from(body))
            for number, patch in _read(body[_MADE.size :]).items():
                if patch.lane < len(low) and low[patch.lane] <= patch.count < high[patch.lane]:
                    newest[patch.lane, patch.count] = number, patch
                later |= patch.lane < len(high) and patch.count >= high[patch.lane]
            at += _RECORD.size + size
        lost = max(self._folder.changes - made, 0)
        if lost and not self._folder.verify:
            raise StoreCorrupted(
                f"Buffer.resume: {self._path} holds something else at byte {at}; expected the last {lost} changed rows. Its "
                f'bytes were damaged: go on without these changes, buffer.resume(example, verify="full").'
            )
        self._end = at
        for number, patch in newest.values():
            if all(0 <= column < columns for column in patch.values):
                patches.insert(PATCH | number, patch)
        patches.resume(max(made, self._folder.changes))
        if later or lost:  # no row to come is to be taken for one that was changed
            self.write(patches)
            self._file.sync()
        return lost

    def _record(self, made: Mapping[int, Patch], ever: int) -> bytes:
        body = _MADE.pack(ever) + b"".join(
            _PATCH.pack(number, patch.lane, patch.count, len(patch.values))
            + b"".join(_VALUE.pack(column, len(value)) + value for column, value in patch.values.items())
            for number, patch in sorted(made.items())
        )
        return _RECORD.pack(_MAGIC, len(body), self._folder.crc(body)) + body


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
