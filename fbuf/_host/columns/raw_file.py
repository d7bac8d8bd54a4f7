"""Keep a column as it is, in a file: a ring with spare places, and a checksum of each row.

Row `count` of a lane is at place `count % places`. A batch of no more rows than there are spare places overwrites expired
rows only, so a write that fails or is killed leaves every other row intact; larger batches are written in parts (`room`).
A checksum covers the bytes of a row, its lane, its count and the store: damaged, stale and foreign rows are found. It is
multilinear modulo 2^64: each 32-bit word times an odd number of its own. A change within one word is always found, any
other is missed with a probability of about 2^-40 at worst.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fbuf._host.columns.raw import DirtyBlocks
from fbuf._host.io.directory import Folder
from fbuf._host.io.file import File, check_size, existing
from fbuf._host.memory.lazy_array import Lazy
from fbuf._host.types import Array, Batch, ColumnData, DType, InvalidRows, Shape, damaged_file, flat, raise_if_corrupted

_FEW = 6
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _numbers(seed: int, count: int) -> Array:
    """Return uint64[count], odd and well mixed (splitmix64), the same on every machine."""
    x = np.uint64(seed) + _STEP * np.arange(1, count + 1, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


class RowChecksums:
    """Checksums of rows of `row` bytes in the store named `seed` (64 bits)."""

    def __init__(self, seed: int, row: int) -> None:
        self._words, rest = divmod(row, 4)
        numbers = _numbers(seed, 2 + self._words + rest)
        self._lane, self._count = numbers[0], numbers[1]
        self._weights, self._rest = numbers[2 : 2 + self._words], numbers[2 + self._words :]

    def names(self, lane: Array, count: Array) -> Array:
        """Return uint64[...] that identify rows by lanes and counts int64[...]; the same for all columns of a store."""
        return lane.astype(np.uint64) * self._lane + (count.astype(np.uint64) + np.uint64(1)) * self._count

    def of(self, rows: Array, names: Array) -> Array:
        """Return the checksums uint64[M] of rows uint8[M, row] with `names` uint64[M]."""
        total = names.copy()
        if self._words:
            words = np.ascontiguousarray(rows[:, : 4 * self._words]) if len(self._rest) else rows
            _add(total, words.view("<u4"), self._weights)
        if len(self._rest):
            _add(total, rows[:, 4 * self._words :], self._rest)
        return total


def _add(total: Array, words: Array, weights: Array) -> None:
    if len(weights) > _FEW:
        total += np.einsum("ij,j->i", words, weights, dtype=np.uint64, casting="unsafe")
    else:  # a sum for each row would cost more than the sums
        for at, weight in enumerate(weights):
            total += np.multiply(words[:, at], weight, dtype=np.uint64)


SUM = 8
"""Bytes of a row's checksum."""
_SPARE = 1024
_BLOCK = 1 << 20  # bytes looked at in one go
_MAGIC = b"fbs1"
_HEADER = struct.Struct("<4sQ")  # magic, places; then a crc of these, then 64 bits for each row


def spare(depth: int) -> int:
    """Return the spare places of a lane: a sixteenth of its rows, from 16 to 1024."""
    return max(16, min(depth // 16, _SPARE))


class RawFileColumn(ColumnData):
    """The newest `depth` rows of each lane, as they are, in a file, and their checksums in another.

    Args:
      folder: The folder.
      name: Of the column: its files are `<name>.rows` and `<name>.sums`; new ones replace what is there.
      fresh: Whether to make new ones.
      batch: Rows a lane that a batch may have at the least.
    Raises:
      OSError: they cannot be made or opened.
      StoreCorrupted: what is there is missing, too small or too large.
    """

    def __init__(
        self, folder: Folder, name: str, shape: Shape, dtype: DType, lanes: int, depth: int, fresh: bool, batch: int
    ) -> None:
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self._sums = RowChecksums(folder.seed, self.row)
        self.unchecked: Array | None = None  # bool[places * E], rows of an existing file that are not checked yet
        rows, sums = folder.file(f"{name}.rows"), folder.file(f"{name}.sums")
        if fresh:
            self.places = depth + max(spare(depth), batch)
            self._marks = File(sums, _HEADER.size + 4 + self.places * lanes * SUM)
            header = _HEADER.pack(_MAGIC, self.places)
            self._marks.write(header + struct.pack("<I", folder.crc(header)), 0)
            self.file = File(rows, self.places * lanes * self.row)
        else:
            self._marks, self.file = existing(sums), existing(rows)
            self.places = self._read_header(folder)
            for file, size in (
                (self.file, self.places * lanes * self.row),
                (self._marks, _HEADER.size + 4 + self.places * lanes * SUM),
            ):
                if file.size != size or self.places <= depth:
                    raise damaged_file(f"{file.path} has {file.size} bytes", f"{size}")
        self.mapping = self.file.map()
        self.table: Array = np.frombuffer(self.mapping, np.uint8)
        self._tracked = DirtyBlocks(self.places, lanes * self.row)

    def _read_header(self, folder: Folder) -> int:
        text = self._marks.read(0, _HEADER.size + 4)
        if len(text) == _HEADER.size + 4 and struct.pack("<I", folder.crc(text[:-4])) == text[-4:]:
            magic, places = _HEADER.unpack(text[:-4])
            if magic == _MAGIC:
                return int(places)
        raise damaged_file(f"{self._marks.path} does not say how many rows there is room for", "that of this store")

    def room(self, count: Array) -> int:
        """Return how many rows a lane can take at once when the lanes have int64[E] `count` rows."""
        return self.places - min(int(count.max()), self.depth)

    def size(self, count: Array) -> int:
        """Return 0: rows are in the page cache only."""
        return 0

    def stage(self, batch: Batch, rows: Array) -> None:
        """Write the rows to places of expired ones. Raises StoreCorrupted: the file was cut short, which a write may hide."""
        check_size(self.mapping, self.file.path)
        if batch.uniform:
            stop = int(batch.after[0])
            start = max(int(batch.before[0]), stop - self.depth)
            new = np.ascontiguousarray(rows[len(rows) - (stop - start) :]).reshape(-1).view(np.uint8)
            if batch.names is None or len(batch.names) * self.row != len(new):
                batch.names = self._sums.names(np.arange(self.lanes), np.arange(start, stop)[:, None]).reshape(-1)
            sums = self._sums.of(new.reshape(-1, self.row), batch.names)
            first = start % self.places
            head = min(self.places - first, stop - start)
            self._tracked.touch(first, first + head)
            self._tracked.touch(0, stop - start - head)
            self._write(self.file, flat(new), first, head, self.lanes * self.row, 0)
            self._write(self._marks, flat(_little(sums)), first, head, self.lanes * SUM, _HEADER.size + 4)
            if self.unchecked is not None:
                places = np.arange(start, stop) % self.places
                self.unchecked.reshape(self.places, self.lanes)[places] = False
        else:
            step, lane, count = batch.places()
            kept = count >= batch.after[lane] - self.depth
            self.put(lane[kept], count[kept], rows[step[kept], lane[kept]])

    @staticmethod
    def _write(file: File, data: memoryview, first: int, head: int, size: int, start: int) -> None:
        """Write rows of `size` bytes from place `first` on; after `head` of them continue at the beginning."""
        file.write(data[: head * size], start + first * size)
        file.write(data[head * size :], start)

    def put(self, lane: Array, count: Array, values: Array) -> None:
        """Write rows `[M, *shape]` at lanes and counts int64[M]."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, self.row)
        self._tracked.touch_at(count % self.places)
        places = count % self.places * self.lanes + lane
        sums = _little(self._sums.of(data, self._sums.names(lane, count))).view(np.uint8).reshape(-1, SUM)
        self.file.scatter(data, places)
        self._marks.scatter(sums, places, _HEADER.size + 4)
        if self.unchecked is not None:
            self.unchecked[places] = False

    # ---------------------------------------------------------------- resuming

    def damaged(self, low: Array, count: Array) -> InvalidRows:
        """Return lanes and counts of the invalid rows among those from int64[E] `low` to `count`."""
        lanes, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        stride = self.lanes * self.row
        used = min(int(count.max(initial=0)), self.places)
        step = max(_BLOCK // stride, 1)
        for first in range(0, used, step):
            places = np.arange(first, min(first + step, used))
            data = self.file.read(first * stride, len(places) * stride)
            data = data.ljust(len(places) * stride, b"\0")  # it was cut short a moment ago
            table = np.frombuffer(data, np.uint8).reshape(-1, self.row)
            place, lane = np.divmod(np.arange(len(table)), self.lanes)
            row = _newest(count[lane], places[place], self.places)
            live = row >= low[lane]
            wrong = self._sums.of(table, self._sums.names(lane, row)) != self._read_sums(first * self.lanes, len(table))
            bad = live & wrong
            lanes.append(lane[bad])
            rows.append(row[bad])
        return np.concatenate(lanes), np.concatenate(rows)

    def _read_sums(self, first: int, number: int) -> Array:
        text = self._marks.read(_HEADER.size + 4 + first * SUM, number * SUM)
        return np.frombuffer(text.ljust(number * SUM, b"\0"), "<u8")

    def resume(self, low: Array, count: Array, checked: bool) -> None:
        """Resume with rows int64[E] `low` to `count`; erase the checksums of all other places for good.

        Args:
          checked: Every row was looked at (`damaged`); else each one is when it is read first.
        """
        step = max(_BLOCK // (8 * self.lanes), 1)
        self.unchecked = None if checked else np.zeros(self.places * self.lanes, bool)
        stale = False
        for first in range(0, self.places, step):
            number = min(step, self.places - first) * self.lanes
            place, lane = np.divmod(np.arange(number), self.lanes)
            row = _newest(count[lane], first + place, self.places)
            sums = self._read_sums(first * self.lanes, number)
            gone = row < low[lane]
            if self.unchecked is not None:
                self.unchecked[first * self.lanes : first * self.lanes + number] = ~gone
            gone &= sums != 0
            if gone.any():
                places = first * self.lanes + np.flatnonzero(gone)
                self._marks.scatter(np.zeros((len(places), 8), np.uint8), places, _HEADER.size + 4)
                stale = True
        if stale:
            self._marks.sync()

    def check(self, table: Array, places: Array, lane: Array, count: Array) -> Array:
        """Return bool[M], which rows uint8[M, row], just read from `places`, are invalid."""
        wrong = np.zeros(len(places), bool)
        if self.unchecked is None:
            return wrong
        new = np.flatnonzero(self.unchecked[places])
        if len(new):
            at = places[new]
            marks = np.concatenate([self._read_sums(p, 1) for p in at.tolist()])
            wrong[new] = self._sums.of(table[new], self._sums.names(lane[new], count[new])) != marks
            self.unchecked[at[~wrong[new]]] = False
        return wrong

    def commit(self, batch: Batch, rows: Array, staged: None) -> None:
        """Do nothing: `stage` wrote the rows, and the store's count makes them readable."""

    def saved(self, count: Array) -> Lazy:
        """Return what `RawColumn.saved` does, read from the file; rows not checked yet are checked."""
        count = count.copy()
        file, row, lanes = self.file, self.row, self.lanes

        def read(start: int, stop: int) -> Array:
            rows = np.empty((stop - start, lanes, row), np.uint8)
            file.fill(rows, start * lanes * row)
            if self.unchecked is not None:
                place, lane = np.divmod(np.arange(start * lanes, stop * lanes), lanes)
                newest = _newest(count[lane], place, self.places)
                bad = self.check(rows.reshape(-1, row), place * lanes + lane, lane, newest)
                raise_if_corrupted(bad, np.ones(len(bad), bool))
            return rows

        return self._tracked.snapshot((min(int(count.max()), self.places), lanes, row), np.uint8, read)

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> RawFileFetch:
        """Say how to fetch rows, as `ColumnData.fetch` describes it."""
        return RawFileFetch(self, count % self.places * self.lanes + lane, lane, count, present, starts)


@dataclass
class RawFileFetch:
    """Rows to copy."""

    ring: RawFileColumn
    at: Array  # int64[M], place of each row
    lane: Array  # int64[M]
    count: Array  # int64[M]
    present: Array
    starts: Array

    may_be_overwritten = True  # the ring wraps around

    def run(self, outs: Sequence[memoryview]) -> Array | None:
        """Fill the outputs of the requests; return bool[M] of damaged rows if some were read for the first time.

        Raises:
          StoreCorrupted: the file was cut short.
        """
        row = self.ring.row
        table = self.ring.table.reshape(-1, row)
        some = np.flatnonzero(self.present)
        if not len(some):
            return None
        check_size(self.ring.mapping, self.ring.file.path)
        # Holes of the file are left alone: a row that is not there is read as one that is.
        places = self.at if len(some) == len(self.at) else np.where(self.present, self.at, self.at[some[0]])
        first = 0
        wrong = None if self.ring.unchecked is None else np.zeros(len(places), bool)
        for at, out in zip(np.split(places, self.starts[1:]), outs, strict=True):
            if len(at):
                filled = np.frombuffer(out, np.uint8).reshape(len(at), -1)
                np.take(table, at, axis=0, out=filled, mode="clip")
                if wrong is not None:
                    mine = first + np.flatnonzero(self.present[first : first + len(at)])
                    read = filled[mine - first]
                    wrong[mine] = self.ring.check(read, places[mine], self.lane[mine], self.count[mine])
            first += len(at)
        return wrong


def _little(sums: Array) -> Array:
    return sums.astype("<u8", copy=False)


def _newest(count: Array, place: Array, places: int) -> Array:
    """Return int64[M], the newest of `count` rows of a lane that belongs at a place; negative if there is none."""
    return count - 1 - (count - 1 - place) % places
