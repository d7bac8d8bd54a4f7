"""Keep a column as encoded chunks in files: `ChunkedColumn` over a `FileArena`, and what a resume needs besides.

Each dictionary is a file named by a hash of its content. `<name>.open` holds the rows of open chunks in two halves a lane,
each labelled with the number of its chunk. A new chunk begins in the other half, so a write that fails before it is counted
overwrites nothing. Index and open rows are also in memory; a resume rebuilds them from the files.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

import numpy as np

from fbuf._host.codecs import PROBE_BYTES, PROBE_CHUNKS, Codec, Dictionary, checksum
from fbuf._host.columns.chunked import ChunkedColumn, Staged
from fbuf._host.columns.raw_file import RowChecksums
from fbuf._host.io.directory import Folder, replace
from fbuf._host.io.file import File, existing, unlink
from fbuf._host.memory.file_arena import NOWHERE, Entry, FileArena
from fbuf._host.types import Array, Batch, DType, InvalidRows, Shape, StoreCorrupted, damaged_file, flat, ranges

# A dictionary that is read has at most the bytes of 512 rows and a megabyte.
_MAX_DICTIONARY_ROWS, _BLOCK = 512, 1 << 20


class ChunkedFileColumn(ChunkedColumn):
    """The newest `depth` rows of each lane, k rows an encoded chunk, in files."""

    def __init__(
        self, folder: Folder, name: str, codec: Codec, shape: Shape, dtype: DType, lanes: int, depth: int, cache: int
    ) -> None:
        super().__init__(codec, shape, dtype, lanes, depth, cache, FileArena(folder, name))
        self.half: Array = np.zeros(lanes, np.int64)  # where the open rows of each lane are
        self._folder = folder
        self._name = name
        self._saved: dict[Dictionary, int] = {}  # dictionaries on the disk, by what they hold
        self._labels = 2 * lanes * 8  # bytes before the rows: the chunk in each half, from 1
        self._sums = RowChecksums(folder.seed, self.row)
        self._marks = self._labels + 2 * lanes * self.k * self.row  # then a sum for each row
        size = self._marks + 2 * lanes * self.k * 8
        path = folder.file(f"{name}.open")
        self._open = File(path, size) if folder.fresh else existing(path)
        self._by_number: dict[int, Dictionary] = {}
        self._entries: list[Entry] = []  # what the segments say, while a store is opened again
        if self._open.size != size:
            raise damaged_file(f"{self._open.path} has {self._open.size} bytes", f"{size}")

    # ---------------------------------------------------------------- writing

    def reserve(self, staged: Staged) -> None:
        """Write everything; none of it counts yet."""
        if staged.blobs:
            known = {d: self._save(d) for d in dict.fromkeys(staged.dictionaries)}
            entries = zip(staged.lanes, staged.chunks, staged.dictionaries, staged.blobs, staged.checksums, strict=True)
            records = [self.arena.head(e, c, known[d], len(blob), crc) + blob for e, c, d, blob, crc in entries]
            staged.addresses = self.arena.append(records)
        staged.half = self._write_open(staged.batch, staged.rows)

    def _write_open(self, batch: Batch, rows: Array) -> Array:
        """Write the rows of the batch that stay open; return int64[E], the halves they are in."""
        k, lanes = self.k, self.lanes
        old, new = batch.before // k, batch.after // k
        half = np.where(new > old, 1 - self.half, self.half)
        if k == 1:  # none stays open
            return half
        fresh = np.flatnonzero((new > old) | (batch.before == 0))
        if len(fresh):
            labels = np.ascontiguousarray((new[fresh] + 1).astype("<u8")).view(np.uint8).reshape(-1, 8)
            self._open.scatter(labels, half[fresh] * lanes + fresh)
        if batch.uniform:
            begin = max(int(new[0]) * k, int(batch.before[0]))
            stay = int(batch.after[0]) - begin
            part = rows[len(rows) - stay :]
            step, lane = np.divmod(np.arange(stay * lanes), lanes)
            count = begin + step
            values = part.reshape(-1, *part.shape[2:])
        else:
            step, lane, count = batch.places()
            stays = count >= new[lane] * k
            lane, count, values = lane[stays], count[stays], rows[step[stays], lane[stays]]
        self._put_open(half, lane, count, values)
        return half

    def _put_open(self, half: Array, lane: Array, count: Array, values: Array) -> None:
        """Write rows `[M, *shape]` of open chunks, by lane and count, and their checksums."""
        k, lanes = self.k, self.lanes
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, self.row)
        places = (half[lane] * k + count % k) * lanes + lane
        sums = (
            self._sums.of(data, self._sums.names(lane, count)).astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)
        )
        self._open.scatter(data, places, self._labels)
        self._open.scatter(sums, places, self._marks)

    def _save(self, dictionary: Dictionary | None) -> int:
        """Write a dictionary to disk unless it is there; return its number."""
        if dictionary is None:
            return 0
        number = self._saved.get(dictionary)
        if number is None:
            content = dictionary.data.as_bytes()
            number = _hash(content)
            replace(self._dictionary(number), lambda file: file.write(content, 0), len(content)).close()
            self._saved[dictionary] = number
        return number

    def _dictionary(self, number: int) -> str:
        return self._folder.file(f"{self._name}.dictionary-{number:016x}")

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Make a staged batch readable and drop expired rows."""
        super().commit(batch, rows, staged)
        self.arena.commit()
        if staged.half is not None:
            self.half = staged.half
        used = set(self.table.values())
        for dictionary in [d for d in self._saved if d not in used]:
            unlink(self._dictionary(self._saved.pop(dictionary)))

    # ---------------------------------------------------------------- whole columns

    def records(self) -> Callable[[int, int, int, bytes, int], bytes]:
        """Return a function (lane, chunk, slot, encoded rows, checksum) -> stored bytes; write the dictionaries to disk."""
        known = {slot: self._save(book) for slot, book in self.table.items()} | {0: 0}

        def record(lane: int, chunk: int, slot: int, blob: bytes, crc: int) -> bytes:
            return self.arena.head(lane, chunk, known[slot], len(blob), crc) + blob

        return record

    def loaded(self, count: Array) -> None:
        """Write the open rows of lanes with int64[E] `count` rows, the last step of loading a new column."""
        first = count // self.k * self.k
        here, number = ranges(first, count)
        labels = np.ascontiguousarray((count // self.k + 1).astype("<u8")).view(np.uint8).reshape(-1, 8)
        self._open.scatter(labels, np.arange(self.lanes))
        self._put_open(self.half, here, number, self.open[here, number % self.k])

    def damaged(self, low: Array, count: Array) -> InvalidRows:
        """Return lanes and counts of the invalid rows among those from int64[E] `low` to `count`."""
        k = self.k
        found = self._found(count)
        lane, chunk = self.live(count, low)
        whole = np.zeros(len(lane), bool)
        for i, place in enumerate(zip(lane.tolist(), chunk.tolist(), strict=True)):
            entry = found.get(place)
            whole[i] = entry is not None and self._is_intact(entry)
        gone, row = lane[~whole].repeat(k), (chunk[~whole][:, None] * k + np.arange(k)).reshape(-1)
        live = row >= low[gone]
        open_lane, open_row, right = self._look_open(count)[:3]
        right |= open_row < low[open_lane]
        return np.concatenate([gone[live], open_lane[~right]]), np.concatenate([row[live], open_row[~right]])

    def _found(self, count: Array) -> dict[tuple[int, int], Entry]:
        """Return where the chunks of lanes with int64[E] `count` rows are."""
        found = self._indexed(count) if self._entries else {}
        places = list(zip(*(numbers.tolist() for numbers in self.live(count)), strict=True))
        for _ in range(2):  # again: only lasting damage counts
            if self._entries and all(place in found for place in places):
                break
            entries = {*self._entries, *self.arena.scan()}
            self._entries = sorted(entries, key=lambda entry: entry.address)  # the order in which they were written
            found = self._indexed(count)
        return found

    def _indexed(self, count: Array) -> dict[tuple[int, int], Entry]:
        tail, stop = self.span(count)
        found: dict[tuple[int, int], Entry] = {}
        for entry in self._entries:
            if entry.lane < self.lanes and tail[entry.lane] <= entry.chunk < stop[entry.lane]:
                place = entry.lane, entry.chunk
                if place not in found or self._is_intact(entry):  # a moved chunk may not have reached the disk
                    found[place] = entry
        return found

    def _is_intact(self, entry: Entry) -> bool:
        dictionary = self._read_dictionary(entry.dictionary) if entry.dictionary else None
        if entry.dictionary and dictionary is None:
            return False
        return checksum(self.arena.view(entry.address, entry.length), dictionary) == entry.checksum

    def resume(self, count: Array) -> None:
        """Find the chunks of lanes with int64[E] `count` rows; missing ones raise when they are read. Chunks of later rows are
        erased for good.

        Raises:
          StoreCorrupted: a dictionary or the open rows are damaged: too many rows need them.
        """
        k = self.k
        stop = count // k
        found = self._found(count)
        self.arena.forget([e.address for e in self._entries if e.lane < self.lanes and e.chunk >= stop[e.lane]])
        self._entries = []
        self._saved = self._read_dictionaries({e.dictionary for e in found.values()} - {0})
        by_number = {number: dictionary for dictionary, number in self._saved.items()}
        lane, chunk = self.live(count)
        newest: Entry | None = None
        for e, c in zip(lane.tolist(), chunk.tolist(), strict=True):
            at = c % self.ring, e
            if (e, c) not in found:
                self._hole(at)
                continue
            entry = found[e, c]
            self.address[at], self.length[at], self.checksum[at] = entry.address, entry.length, entry.checksum
            self.slot[at] = self.enter(by_number.get(entry.dictionary))
            newest = entry if newest is None or entry.address > newest.address else newest
        present = np.array([(e, c) in found for e, c in zip(lane.tolist(), chunk.tolist(), strict=True)], bool)
        at_all = chunk[present] % self.ring, lane[present]
        self.arena.hold(self.address[at_all], self.length[at_all])
        self.arena.prune()
        number = max(len(found), 1)
        self.closed = int(stop.sum())
        self.encoded = int(sum(e.length for e in found.values()) / number * self.closed)
        self.probed = self.probed or self.closed * k * self.row >= PROBE_BYTES or self.closed >= PROBE_CHUNKS
        self.coder.adopt(None if newest is None else by_number.get(newest.dictionary), self.closed * k)
        self._read_open(count)

    def _hole(self, at: tuple[int, int]) -> None:
        """Mark a chunk as lost: reading it raises StoreCorrupted."""
        self.address[at], self.length[at], self.slot[at] = NOWHERE, 0, 0
        self.checksum[at] = 1 ^ zlib.crc32(b"")

    def _read_dictionary(self, number: int) -> Dictionary | None:
        """Read a dictionary from disk; None if it is missing or damaged."""
        known = self._by_number.get(number)
        if known is None:
            try:
                file = File(self._dictionary(number))
            except (FileNotFoundError, StoreCorrupted):
                return None
            size = file.size if file.size <= _MAX_DICTIONARY_ROWS * self.row + _BLOCK else 0
            content = file.read(0, size)
            if _hash(content) != number:
                content = file.read(0, size)  # again: only lasting damage counts
            file.close()
            if _hash(content) != number:
                return None
            known = self._by_number[number] = Dictionary(content)
        return known

    def _read_dictionaries(self, numbers: set[int]) -> dict[Dictionary, int]:
        read = dict[Dictionary, int]()
        for name in self._folder.files(f"{self._name}.dictionary-"):  # of chunks that came to nothing, or are gone
            if name.rpartition("-")[2] not in {f"{number:016x}" for number in numbers}:
                unlink(self._folder.file(name))
        for number in sorted(numbers):
            dictionary = self._read_dictionary(number)
            if dictionary is None:
                if self._folder.verify:
                    continue  # rows that need it were dropped
                name = self._dictionary(number)
                raise StoreCorrupted(f'Buffer.resume: {name} is damaged. Write buffer.resume(example, verify="full").')
            read[dictionary] = number
        self._by_number = {}
        return read

    def _read(self, at: int, size: int) -> bytes:
        return self._open.read(at, size).ljust(size, b"\0")  # it may have been cut short a moment ago

    def _look_open(self, count: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Return lane, count and validity of every open row, the half of each lane, and the rows uint8[2, k, E, row]."""
        lanes = self.lanes
        first = count // self.k * self.k
        labels = np.frombuffer(self._read(0, self._labels), "<u8").astype(np.int64)
        right = labels.reshape(2, lanes) == count // self.k + 1
        half = np.argmax(right, axis=0)
        number = 2 * self.k * lanes
        table = np.frombuffer(self._read(self._labels, number * self.row), np.uint8).reshape(2, self.k, lanes, self.row)
        sums = np.frombuffer(self._read(self._marks, number * 8), "<u8").reshape(2, self.k, lanes)
        lane, row = ranges(first, count)
        at = half[lane], row % self.k, lane
        same = self._sums.of(table[at].reshape(len(lane), self.row), self._sums.names(lane, row)) == sums[at]
        return lane, row, same & right.any(axis=0)[lane], half, table

    def _read_open(self, count: Array) -> None:
        lanes = self.lanes
        lane, row, right, self.half, table = self._look_open(count)
        if not right.all():  # again: only lasting damage counts
            lane, row, right, self.half, table = self._look_open(count)
        if not right.all():
            where = f"lane {int(lane[~right][0])} of {self._open.path}"
            raise StoreCorrupted(f'Buffer.resume: {where} is damaged. Write buffer.resume(example, verify="full").')
        rows = table[self.half, :, np.arange(lanes)]
        if self.open.nbytes:
            flat(self.open)[:] = flat(np.ascontiguousarray(rows))
        # Erase what must not pass for later rows: the other half, and rows beyond the count.
        labels = np.zeros((2, lanes), "<u8")
        labels[self.half, np.arange(lanes)] = count // self.k + 1
        kept = np.zeros((2, self.k, lanes), "<u8")
        kept[self.half[lane], row % self.k, lane] = self._sums.of(rows[lane, row % self.k], self._sums.names(lane, row))
        if self._read(self._marks, kept.nbytes) + self._read(0, labels.nbytes) != kept.tobytes() + labels.tobytes():
            self._open.write(flat(kept), self._marks)
            self._open.write(flat(labels), 0)
            self._open.sync()


def _hash(content: bytes) -> int:
    """Return the number of a dictionary; 0 stands for none."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") or 1
