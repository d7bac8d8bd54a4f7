"""Keep updated rows beside the stream, in memory (`RowUpdates`) and in files (`UpdateLog`).

An update holds the columns that differ from its row, under a ticket with bit 63 set. It is dropped with the row it replaced,
or `slack` updates after another one replaced it. Updates are encoded one by one, without dictionaries: they are corrections,
not streams. The log has one record a call, with a checksum, written before the update is visible. The head of the directory
counts all updates: a truncated log is noticed, and a record beyond that count is dropped. The log is rewritten when most of it
is unused.
"""

from __future__ import annotations

import contextlib
import heapq
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fbuf._host.codecs import Codec, Zstd
from fbuf._host.io.directory import Folder, replace
from fbuf._host.io.file import File, existing, exists
from fbuf._host.types import Array, StoreCorrupted, corrupted, damaged_file, flat

UPDATE_BIT = 1 << 63
CUT = 2**32 - 1
"""In place of a column: a cut follows the row."""
_OVERHEAD = 600  # bytes of Python objects a update takes, about
_RAW, _ZSTD = b"\0", b"\1"
_HEAD = 5  # bytes of a value that say how it is encoded, and the checksum of the rest


@dataclass
class RowUpdate:
    """An updated row: its row in the stream, and the columns that differ from it."""

    lane: int
    count: int
    values: dict[int, bytes]  # also under `CUT`
    superseded: int = -1  # updates made when another update replaced this one


class RowUpdates:
    """All updated rows of a store. Not thread-safe; exceptions leave it unchanged."""

    def __init__(self, codecs: Sequence[Codec | None], slack: int) -> None:
        self.live: dict[int, RowUpdate] = {}  # by ticket
        self.made = 0
        self.nbytes = 0
        self._codecs = codecs
        self._slack = max(slack, 1)
        self._origins: dict[tuple[int, int], list[int]] = {}  # tickets by the row they come from
        self._heaps: dict[int, list[int]] = {}  # counts of those rows by lane, oldest first
        self._superseded: deque[int] = deque()

    def prepare(self, old: int, lane: int, count: int, fields: Mapping[int, Array]) -> RowUpdate:
        """Return the row of ticket `old`, row `count` of its lane, with these columns replaced; not yet stored.

        Without columns, a cut follows it.
        """
        before = self.live.get(old)
        values = dict(before.values) if before is not None else {}
        return RowUpdate(lane, count, values | ({c: self._encode(c, v) for c, v in fields.items()} or {CUT: _RAW}))

    def add(self, updates: Sequence[tuple[int, RowUpdate]]) -> list[int]:
        """Store prepared updates, each with the ticket it replaces; return their tickets."""
        tickets = []
        for old, update in updates:
            self.made += 1
            self.insert(UPDATE_BIT | self.made, update)
            tickets.append(UPDATE_BIT | self.made)
            replaced = self.live.get(old)
            if replaced is not None and replaced.superseded < 0:
                replaced.superseded = self.made
                self._superseded.append(old)
        while self._superseded and self._drop(self._superseded[0]):
            self._superseded.popleft()
        return tickets

    def insert(self, ticket: int, update: RowUpdate) -> None:
        """Store an update under this ticket."""
        self.live[ticket] = update
        self.nbytes += _size(update)
        origin = update.lane, update.count
        if origin not in self._origins:
            self._origins[origin] = []
            heapq.heappush(self._heaps.setdefault(update.lane, []), update.count)
        self._origins[origin].append(ticket)

    def newest(self, lane: int, count: int) -> int:
        """Return the ticket of the last update of a row; 0 if there is none."""
        return max(self._origins.get((lane, count), (0,)))

    def resume(self, made: int) -> None:
        """Resume after the updates of a checkpoint were inserted."""
        self.made = made
        order = sorted((p.superseded, t) for t, p in self.live.items() if p.superseded >= 0)
        self._superseded.extend(t for _, t in order)

    def _drop(self, ticket: int) -> bool:
        """Drop a superseded update unless it is too recent."""
        update = self.live.get(ticket)
        if update is not None:
            if self.made - update.superseded < self._slack:
                return False
            # Its successor has the same origin, so the origin's list does not run empty.
            self._origins[update.lane, update.count].remove(ticket)
            self._remove(ticket)
        return True

    def expire(self, low: Array) -> None:
        """Drop updates of rows before int64[E] `low`."""
        for lane in list(self._heaps):
            heap, least = self._heaps[lane], int(low[lane])
            while heap and heap[0] < least:
                for ticket in self._origins.pop((lane, heapq.heappop(heap))):
                    self._remove(ticket)
            if not heap:
                del self._heaps[lane]

    def forget(self, counts: Sequence[int]) -> None:
        """Drop updates of these rows, where rows are in any order."""
        self._heaps.clear()
        if self._origins:
            for count in counts:
                for ticket in self._origins.pop((0, count), ()):
                    self._remove(ticket)

    def _remove(self, ticket: int) -> None:
        self.nbytes -= _size(self.live.pop(ticket))

    def _encode(self, column: int, value: Array) -> bytes:
        kind, data = _RAW, bytes(flat(np.ascontiguousarray(value)))
        codec = self._codecs[column]
        if isinstance(codec, Zstd) and len(data) >= 64:
            packed = codec.encode(np.frombuffer(data, np.uint8))
            if len(packed) < len(data):
                kind, data = _ZSTD, packed
        return kind + zlib.crc32(data, kind[0]).to_bytes(4, "little") + data

    def decode(self, column: int, value: bytes, target: memoryview) -> None:
        """Write a value of an update to `target`. Raises StoreCorrupted on damaged bytes."""
        kind, data, codec = value[:1], memoryview(value)[_HEAD:], self._codecs[column]
        intact = len(value) >= _HEAD and value[1:_HEAD] == zlib.crc32(data, kind[0]).to_bytes(4, "little")
        if intact and kind == _ZSTD and isinstance(codec, Zstd):
            codec.decode(data, np.frombuffer(target, np.uint8))
        elif intact and kind == _RAW and len(data) == len(target):
            target[:] = data
        else:
            raise corrupted(f"a changed row of column {column} is damaged", f"{len(target)} bytes as stored")


def _size(update: RowUpdate) -> int:
    return _OVERHEAD + sum(map(len, update.values.values()))


_RECORD = struct.Struct("<4sII")  # magic, bytes of the body, its crc
_MADE = struct.Struct("<Q")  # what the body begins with: changes made ever, up to this record
_MAGIC = b"fbp1"
_UPDATE = struct.Struct("<QIQI")  # number, lane, count, values
_VALUE = struct.Struct("<II")  # column, bytes
_LEAST = 1 << 20


class UpdateLog:
    """The log of a store, in the file `changes` of its folder."""

    def __init__(self, folder: Folder) -> None:
        self._path = folder.file("changes")
        self._folder = folder
        self._before: File | None = None  # the log that was rewritten last, as an earlier process left it
        if not folder.fresh and exists(f"{self._path}.old"):
            self._before = File(f"{self._path}.old")
        missing = self._before is not None and not exists(self._path)  # the process ended between two renames
        self._file = File(self._path, 0) if folder.fresh or missing else existing(self._path)
        self._end = 0

    @contextlib.contextmanager
    def appended(self, first: int, made: Iterable[RowUpdate]) -> Iterator[None]:
        """Append updates numbered from `first` on; undo that if the `with` block fails."""
        numbered = dict(enumerate(made, first))
        record = self._record(numbered, max(numbered, default=first - 1))
        try:
            self._file.write(record, self._end)
            yield
        except BaseException:
            self._file.size = self._end
            with contextlib.suppress(OSError):  # the next record overwrites it; readers skip an incomplete one
                self._file.empty(self._end)
            raise
        self._end += len(record)

    def tidy(self, updates: RowUpdates) -> None:
        """Rewrite the log if most of it is unused and that succeeds."""
        if self._end < max(_LEAST, 4 * updates.nbytes):
            return
        with contextlib.suppress(OSError):
            self.write(updates)

    def write(self, updates: RowUpdates, sync: bool = False) -> None:
        """Rewrite the log, and with `sync` wait for the disk. Raises OSError and leaves it unchanged if that fails."""
        record = self._record({ticket & ~UPDATE_BIT: update for ticket, update in updates.live.items()}, updates.made)

        def fill(file: File) -> None:
            file.write(record, 0)
            if sync:
                file.sync()

        if sync:
            self._file = replace(self._path, fill, len(record))
        else:
            self._file = self._folder.replace("changes", fill, len(record))
        self._end = len(record)

    def load(self, updates: RowUpdates, low: Array, high: Array, columns: int) -> int:
        """Load the last update of each row, of lanes that hold rows `low[e]` to `high[e] - 1`.

        Returns:
          How many changes are lost.
        Raises:
          StoreCorrupted: some are, and the folder is not to go on with what is whole.
        """
        newest: dict[tuple[int, int], tuple[int, RowUpdate]] = {}
        made, later, at, is_confirmed = 0, False, 0, True
        for body, end in self._records():
            at = end
            (number,) = _MADE.unpack_from(body)
            if number > self._folder.changes:  # its call raised, or was killed, before the head counted it
                is_confirmed = False
                continue
            made = max(made, number)
            try:
                updated = _read(body[_MADE.size :])
            except struct.error as error:
                raise damaged_file(f"{self._path} holds something else before byte {end}", "changed rows") from error
            for number, update in updated.items():
                if update.lane < len(low) and low[update.lane] <= update.count < high[update.lane]:
                    row = update.lane, update.count
                    newest[row] = max((number, update), newest.get(row, (0, update)), key=lambda known: known[0])
                later |= update.lane < len(high) and update.count >= high[update.lane]
        lost = max(self._folder.changes - made, 0)
        if lost and not self._folder.verify:
            raise StoreCorrupted(
                f"Buffer.resume: {self._path} holds something else at byte {at}; expected the last {lost} changed rows. Its "
                f'bytes were damaged: go on without these changes, buffer.resume(example, verify="full").'
            )
        self._end = at
        for number, update in newest.values():
            if all(0 <= column < columns or column == CUT for column in update.values):
                updates.insert(UPDATE_BIT | number, update)
        updates.resume(max(made, self._folder.changes))
        # No row or update to come is to be taken for one of these.
        if later or lost or not is_confirmed or self._before is not None:
            self.write(updates, sync=True)
        if self._before is not None:
            self._before = None
            self._folder.retire("changes.old")
        return lost

    def _records(self) -> Iterator[tuple[bytes, int]]:
        """Yield the body of each record and where it ends, those of the log before the last rewrite first."""
        for file in (self._before, self._file):
            at = 0
            while file is not None and at + _RECORD.size <= file.size:
                body = self._body(file, at) or self._body(file, at)  # again: only lasting damage counts
                if not body:
                    break  # the process ended there, or it was damaged
                at += _RECORD.size + len(body)
                yield body, at

    def _body(self, file: File, at: int) -> bytes:
        """Return the body of the record at a place, b"" if it is invalid."""
        head = file.read(at, _RECORD.size)
        magic, size, crc = _RECORD.unpack(head.ljust(_RECORD.size, b"\0"))
        if magic != _MAGIC or at + _RECORD.size + size > file.size or size < _MADE.size:
            return b""
        body = file.read(at + _RECORD.size, size)
        return body if len(body) == size and self._folder.crc(body) == crc else b""

    def _record(self, made: Mapping[int, RowUpdate], ever: int) -> bytes:
        body = _MADE.pack(ever) + b"".join(
            _UPDATE.pack(number, update.lane, update.count, len(update.values))
            + b"".join(_VALUE.pack(column, len(value)) + value for column, value in update.values.items())
            for number, update in sorted(made.items())
        )
        return _RECORD.pack(_MAGIC, len(body), self._folder.crc(body)) + body


def _read(body: bytes) -> dict[int, RowUpdate]:
    """Parse the updates of a record. Raises struct.error: the bytes are not a record, although their checksum is right."""
    made: dict[int, RowUpdate] = {}
    at = 0
    while at < len(body):
        number, lane, count, values = _UPDATE.unpack_from(body, at)
        at += _UPDATE.size
        columns = {}
        for _ in range(values):
            column, size = _VALUE.unpack_from(body, at)
            columns[column] = body[at + _VALUE.size : at + _VALUE.size + size]
            at += _VALUE.size + size
        made[number] = RowUpdate(lane, count, columns)
    return made
