"""Keep a column as encoded chunks in memory: k consecutive rows of a lane each, in an `Arena`.

The index is four arrays used as rings, 18 bytes a chunk: address, length, dictionary and the checksum of the encoded bytes.
The checksum is a crc32 seeded with the dictionary's own, so bytes that are damaged, swapped or paired with another
dictionary are noticed before they are decoded. It is compared where bytes come from files, also those of a checkpoint.

Live rows follow from their count, or are given: `low` for the frames of stacks, `Batch.evicted` for rows in any order.
`recompress` replaces closed chunks. `fetch_chunks` finds chunks under the store's lock; `ChunkFetch.run` decodes each once,
for all requests, without it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fbuf._host import codecs
from fbuf._host.codecs import Codec, Coder, Copy, Dictionary, EncodedChunks, Zstd, ZstdCoder, checksum, coder_of
from fbuf._host.columns import recompress
from fbuf._host.columns.recompress import Packer, RecompressedChunks, RecompressJob
from fbuf._host.memory.arena import Arena
from fbuf._host.types import Array, Batch, ColumnStats, DType, Shape, StoreCorrupted, flat, ranges


class ChunkCache:
    """Decoded chunks by address; the least recently used are evicted first. Thread-safe.

    Addresses are never reused, so no entry is ever stale.

    Args:
      limit: Bytes of rows kept at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = self.misses = 0
        self._rows: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, address: int) -> memoryview | None:
        """Return the rows of a chunk, or None."""
        with self._lock:
            rows = self._rows.get(address)
            if rows is None:
                self.misses += 1
            else:
                self.hits += 1
                self._rows.move_to_end(address)
            return rows

    def put(self, address: int, rows: memoryview) -> None:
        """Keep rows that are never written again."""
        with self._lock:
            if len(rows) > self.limit or address in self._rows:
                return
            self._rows[address] = rows
            self.nbytes += len(rows)
            while self.nbytes > self.limit:
                self.nbytes -= len(self._rows.popitem(last=False)[1])


class ChunkIndex(Protocol):
    """A column of chunks: `ChunkedColumn`, or a read-only one."""

    k: int  # rows of a chunk
    row: int  # bytes of a row
    lanes: int
    ring: int  # chunks the index has room for; its arrays are [ring, E], or [ring] of one lane
    address: Array
    length: Array
    checksum: Array
    slot: Array
    table: Any  # dictionaries: `get(slot)`
    arena: Any  # `views(addresses, lengths)` yields the bytes
    open: Array  # [E, k, *shape], chunks that are being filled
    coder: Coder
    cache: ChunkCache | None
    verified: bool  # whether chunks are compared with their checksums: bytes that come from files may be anything


@dataclass
class ChunkFetch:
    """Chunks to decode and where their rows go. Keeps alive what it reads."""

    may_be_overwritten = False  # the bytes of a chunk are never overwritten

    coder: Coder
    chunks: EncodedChunks
    opened: list[memoryview]  # rows of chunks that were still open, which follow those
    copies: Iterable[Copy]
    cache: ChunkCache | None

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fill the outputs of the requests. Raises StoreCorrupted, or what a user's codec raises."""
        self.coder.decode_chunks(self.chunks, self.opened, self.copies, outs, self.cache)


def fetch_chunks(
    index: ChunkIndex, lane: Array, count: Array, present: Array, rows: Array, starts: Array
) -> ChunkFetch:
    """Find the chunks of rows, as `ColumnData.fetch` describes it.

    Cost: a few tens of microseconds, and about 0.5 us a chunk.
    """
    k, ring, lanes = index.k, index.ring, index.lanes
    chunk = count // k
    at = count - chunk * k
    # A run is consecutive rows of one chunk that go to consecutive places: one copy.
    breaks = np.ones(len(lane) + 1, bool)
    breaks[1:-1] = (count[1:] != count[:-1] + 1) | (at[1:] == 0) | (present[1:] != present[:-1])
    if lanes > 1:
        breaks[1:-1] |= lane[1:] != lane[:-1]
    breaks[starts] = True
    edges = np.flatnonzero(breaks)
    begin, size = edges[:-1], edges[1:] - edges[:-1]
    wanted = present[begin]
    if not wanted.all():
        begin, size = begin[wanted], size[wanted]
    lane, chunk = lane[begin], chunk[begin]
    key = np.where(chunk == rows[lane] // k, ring, chunk % ring)
    if lanes > 1:
        key = key * lanes + lane
    order = np.argsort(key, kind="stable")
    begin, size, key = begin[order], size[order], key[order]
    first_of_chunk = np.ones(len(key), bool)
    first_of_chunk[1:] = key[1:] != key[:-1]
    request = np.searchsorted(starts, begin, side="right") - 1
    size *= index.row
    to = (begin - starts[request]) * index.row
    source = at[begin] * index.row
    table = first_of_chunk, request, to, to + size, source, source + size
    copies = zip(*(column.tolist() for column in table), strict=True)
    unique = key[first_of_chunk]
    closed = unique[: np.searchsorted(unique, ring * lanes)]
    addresses = index.address.reshape(-1)[closed]
    slots = index.slot.reshape(-1)[closed].tolist()
    chunks = EncodedChunks(
        index.arena.views(addresses, index.length.reshape(-1)[closed]),
        slots,
        {slot: index.table.get(slot) for slot in set(slots)},
        index.checksum.reshape(-1)[closed].tolist() if index.verified else None,
        addresses.tolist() if index.cache is not None else (),
    )
    # The store keeps filling open chunks: take a copy now. Their keys are the largest, so they come last.
    opened = [flat(index.open[e].copy()) for e in (unique[len(closed) :] - ring * lanes).tolist()]
    return ChunkFetch(index.coder, chunks, opened, copies, index.cache)


_INDEX_BYTES = 18  # a chunk
_LARGE = 1 << 22
"""Bytes of chunks from which a column keeps its compression context between writes: half a megabyte, or 10 us a write."""


@dataclass
class Staged:
    """Hold a batch encoded for one column, not yet visible."""

    batch: Batch
    rows: Array
    lanes: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    dictionaries: list[Dictionary | None] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    addresses: Array | None = None
    half: Array | None = None  # of rows in files: int64[E], where the open rows of each lane are, once they are written
    incompressible: bool = False


class ChunkedColumn:
    """The newest `depth` rows of each lane, k rows an encoded chunk; the open chunk of a lane is not encoded."""

    def __init__(
        self, codec: Codec, shape: Shape, dtype: DType, lanes: int, depth: int, cache: int = 0, arena: Any = None
    ) -> None:
        self.k = codec.chunk
        self.cache = ChunkCache(cache) if cache else None  # of so many bytes
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.coder: Coder = coder_of(codec, shape, dtype, depth * lanes)
        # Two tails: of chunks as they come, and of those compressed again.
        self.arena: Any = Arena(tails=2) if arena is None else arena
        self.verified = arena is not None
        self.open: Array = np.empty((lanes, self.k, *shape), dtype)
        self.table: dict[int, Dictionary] = {}  # dictionaries with live chunks, by slot >= 1
        self.ring = depth // self.k + 2
        self.address = np.zeros((self.ring, lanes), np.uint64)
        self.length = np.zeros((self.ring, lanes), np.uint32)
        self.checksum = np.zeros((self.ring, lanes), np.uint32)
        self.slot = np.zeros((self.ring, lanes), np.uint16)
        self.closed = 0  # chunks ever encoded
        self.encoded = 0  # and their bytes
        self.probed = not isinstance(codec, Zstd)  # what a codec of the user's gives is what rows are
        self.packed: Array = np.zeros(lanes, np.int64)  # chunks before this one are not compressed again
        self.packer: Packer | None = None
        if isinstance(self.coder, ZstdCoder) and recompress.applies(codec) and arena is None:
            self.packer = Packer(self.coder, self.k * self.row)
        self.job_size = max(recompress.JOB_BYTES // max(self.k * self.row, 1), 256)

    # ---------------------------------------------------------------- size

    def span(self, count: Array, low: Array | None = None) -> tuple[Array, Array]:
        """Return the first live and the first open chunk of each lane with `count` rows; `low` is its first row if not given
        by depth.
        """
        first = np.maximum(count - self.depth, 0) if low is None else low
        return first // self.k, count // self.k

    def live(self, count: Array, low: Array | None = None) -> tuple[Array, Array]:
        """Return (lane, chunk) of all closed live chunks, oldest first."""
        lane, chunk = ranges(*self.span(count, low))
        order = np.argsort(chunk, kind="stable")
        return lane[order], chunk[order]

    def size(self, count: Array) -> int:
        """Return the bytes of segments (capacity), index rows written to, dictionaries, context and open chunks."""
        used = min(int(count.max(initial=0)) // self.k, self.ring)
        total = self.arena.memory + self.open.nbytes + self.coder.nbytes + _INDEX_BYTES * self.lanes * used
        sizes = {id(d): d.nbytes for d in self.table.values()}
        for book in (self.coder.current, self.packer.latest if self.packer is not None else None):
            if book is not None:
                sizes[id(book)] = book.nbytes
        return total + sum(sizes.values()) + (self.cache.nbytes if self.cache is not None else 0)

    def column_stats(self, count: Array, low: Array | None = None) -> ColumnStats:
        """Count closed chunks, their bytes, and dictionaries with live chunks."""
        start, stop = self.span(count, low)
        return ColumnStats(int((stop - start).sum()), self.arena.live, len(self.table))

    # ---------------------------------------------------------------- writing

    def stage(self, batch: Batch, rows: Array) -> Staged:
        """Encode the chunks that a batch completes. Readers see no change."""
        k, staged = self.k, Staged(batch, rows)
        first = batch.before // k
        stop = batch.after // k
        if not (stop > first).any():
            return staged
        # Rows that fill an open chunk go to places above the lane's count, which no reader looks at.
        self._fill(batch, rows, first, only=stop > first)
        oldest = self.span(batch.after, batch.low and batch.low[1])[0]
        start = np.maximum(first, oldest)
        encoded = 0
        lanes, chunks = ranges(start, stop)
        order = np.argsort(chunks - start[lanes], kind="stable")  # of time, so that dictionaries see every lane
        lanes, chunks = lanes[order], chunks[order]
        begins = chunks * k - batch.before[lanes]
        for lane, chunk, at in zip(lanes.tolist(), chunks.tolist(), begins.tolist(), strict=True):
            data = self.open[lane] if at < 0 else batch.lane(rows, lane, at, at + k)
            dictionary = self.coder.current
            blob = self.coder.encode(data)
            staged.lanes.append(lane)
            staged.chunks.append(chunk)
            staged.blobs.append(blob)
            staged.dictionaries.append(dictionary)
            staged.checksums.append(checksum(blob, dictionary))
            encoded += len(blob)
            total = self.closed + len(staged.blobs)
            seen = total * k * self.row >= codecs.PROBE_BYTES or total >= codecs.PROBE_CHUNKS
            if seen and not self.probed:
                if not self._worthwhile(batch, staged, self.encoded + encoded, total):
                    staged.incompressible = True  # asked again if the write fails
                    break
                self.probed = True
            if self.coder.due(total * k):
                self._renew(batch, staged, total)
        if self.arena.live < _LARGE:
            self.coder.free_context()
        return staged

    def _worthwhile(self, batch: Batch, staged: Staged, encoded: int, total: int) -> bool:
        """Return whether the column compresses; rows that repeat one another may need a dictionary first."""
        if total * self.k * self.row >= codecs.WORTHWHILE * encoded:
            return True
        mean = self._renew(batch, staged, total)
        return mean is not None and self.k * self.row >= codecs.WORTHWHILE * mean

    def _renew(self, batch: Batch, staged: Staged, total: int) -> float | None:
        lane, chunk = self.live(batch.before, batch.low and batch.low[0])
        old = len(lane)

        decode = self.coder.decoder()

        def fetch(i: int) -> memoryview:
            if i < old:
                at = chunk[i] % self.ring, lane[i]
                data = self.arena.view(int(self.address[at]), int(self.length[at]))
                return decode(data, int(self.checksum[at]), self.table.get(int(self.slot[at])))
            return decode(memoryview(staged.blobs[i - old]), staged.checksums[i - old], staged.dictionaries[i - old])

        try:
            return self.coder.renew(total * self.k, old + len(staged.blobs), fetch)
        except StoreCorrupted:  # of an old chunk: who reads it will be told, who writes need not be
            return None

    def _fill(self, batch: Batch, rows: Array, chunk: Array, only: Array | None = None) -> None:
        """Copy rows of a batch into the open chunks of their lanes."""
        k = self.k
        if batch.uniform:
            begin = max(int(chunk[0]) * k - int(batch.before[0]), 0)
            end = min(int(chunk[0] + 1) * k - int(batch.before[0]), len(rows))
            if end > begin:
                at = (int(batch.before[0]) + begin) % k
                self.open[:, at : at + end - begin] = rows[begin:end].swapaxes(0, 1)
            return
        step, lane, count = batch.places()
        here = count // k == chunk[lane]
        if only is not None:
            here &= only[lane]
        self.open[lane[here], count[here] % k] = rows[step[here], lane[here]]

    def widen(self, chunks: int, count: Array, low: Array) -> None:
        """Make room in the index for this many live chunks a lane, of rows that are not kept by depth alone."""
        if chunks > self.ring:
            self.resize(max(chunks, self.ring + self.ring // 4), count, low)

    def resize(self, ring: int, count: Array, low: Array) -> None:
        """Give the index room for exactly `ring` chunks a lane."""
        lane, chunk = self.live(count, low)
        wider = []
        for array in (self.address, self.length, self.checksum, self.slot):
            wider.append(np.zeros((ring, self.lanes), array.dtype))
            wider[-1][chunk % ring, lane] = array[chunk % self.ring, lane]
        self.ring = ring
        self.address, self.length, self.checksum, self.slot = wider

    def reserve(self, staged: Staged) -> None:
        """Store the encoded bytes. The last step that can fail; `cancel` undoes it."""
        if staged.blobs:
            staged.addresses = self.arena.append(staged.blobs)

    def cancel(self, staged: Staged) -> None:
        """Undo `reserve`."""
        if staged.addresses is not None:
            self.arena.undo(staged.addresses, np.array([len(b) for b in staged.blobs], np.int64))
            staged.addresses = None

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Make a staged batch readable and drop expired rows."""
        low, new_low = batch.low or (None, None)
        tail, head = self.span(batch.before, low)
        new_tail, new_head = self.span(batch.after, new_low)
        gone = np.minimum(new_tail, head)
        if batch.evicted is not None:
            self._evict(np.zeros(len(batch.evicted), np.int64), batch.evicted)
        elif (gone > tail).any():
            self._evict(*ranges(tail, gone))
        if staged.blobs:
            assert staged.addresses is not None
            chunks = np.array(staged.chunks, np.int64) if batch.at is None else batch.at
            at = chunks % self.ring, np.array(staged.lanes, np.int64)
            self.address[at] = staged.addresses
            self.length[at] = [len(b) for b in staged.blobs]
            self.checksum[at] = staged.checksums
            self.slot[at] = [self.enter(d) for d in staged.dictionaries]
            self.closed += len(staged.blobs)
            self.encoded += sum(len(b) for b in staged.blobs)
        self._fill(batch, rows, new_head)

    def enter(self, dictionary: Dictionary | None) -> int:
        """Return the slot of a dictionary that one more live chunk needs."""
        if dictionary is None:
            return 0
        if dictionary.count == 0:
            dictionary.slot = next(i for i in range(1, 1 << 16) if i not in self.table)
            self.table[dictionary.slot] = dictionary
        dictionary.count += 1
        return dictionary.slot

    def _evict(self, lane: Array, chunk: Array) -> None:
        at = chunk % self.ring, lane
        self._release(self.address[at], self.length[at], self.slot[at])
        self.length[at] = 0  # tells `_still` that the chunk is gone: the entry stays until another takes it

    def _release(self, address: Array, length: Array, slot: Array) -> None:
        """Free the bytes of chunks, and dictionaries with their last chunk."""
        self.arena.release(address, length)
        slots, counts = np.unique(slot, return_counts=True)
        for number, n in zip(slots.tolist(), counts.tolist(), strict=True):
            if number:
                self.table[number].count -= n
                if self.table[number].count == 0:
                    del self.table[number]

    def compact(self, count: Array, low: Array | None = None) -> None:
        """Move chunks out of segments that are mostly empty."""
        numbers = self.arena.sparse()
        if not numbers:
            return
        lane, chunk = self.live(count, low)
        moved = self.arena.within(self.address[chunk % self.ring, lane], numbers)
        at = chunk[moved] % self.ring, lane[moved]
        old, length = self.address[at], self.length[at]
        try:
            self.address[at] = self.arena.move(old, length)
        except (MemoryError, OSError):  # it only saves memory
            return
        self.arena.release(old, length)
        self.arena.commit()

    # ---------------------------------------------------------------- compressing again

    def _waiting(self, count: Array, low: Array | None) -> int:
        tail, head = self.span(count, low)
        return int(np.maximum(head - np.maximum(tail, self.packed), 0).sum())

    def next_job(self, count: Array, least: int | None, low: Array | None = None) -> RecompressJob | None:
        """Return the oldest chunks not yet recompressed, if there are `least` (None: a whole job); the store's lock is held."""
        if self.packer is None or self._waiting(count, low) < (self.job_size if least is None else least):
            return None
        tail, head = self.span(count, low)
        lane, chunk = ranges(np.maximum(tail, self.packed), head)
        order = np.argsort(chunk, kind="stable")[: self.job_size]
        lane, chunk = lane[order], chunk[order]
        at = chunk % self.ring, lane
        dictionaries = [self.table.get(slot) for slot in self.slot[at].tolist()]
        return RecompressJob(self, lane, chunk, self.address[at], self.checksum[at], dictionaries)

    def _still(self, job: RecompressJob, picks: list[int]) -> tuple[Array, Array, Array]:
        """Return which chunks of a job are still there, int64[M], and their places in the index."""
        at = job.chunk[picks] % self.ring, job.lane[picks]
        live = np.flatnonzero((self.address[at] == job.address[picks]) & (self.length[at] > 0))  # never used twice
        return live, at[0][live], at[1][live]

    def read_job(self, job: RecompressJob, picks: list[int]) -> dict[int, memoryview]:
        """Return the chunks of a job that are still there; the store's lock is held."""
        live, *where = self._still(job, picks)
        at = where[0], where[1]
        return dict(
            zip([picks[i] for i in live.tolist()], self.arena.views(self.address[at], self.length[at]), strict=True)
        )

    def replace_chunks(self, job: RecompressJob, packed: RecompressedChunks) -> None:
        """Replace chunks that are still there by recompressed ones; both locks of the store are held."""
        live, *where = self._still(job, packed.at)
        picks, at = live.tolist(), (where[0], where[1])
        blobs = [packed.blobs[i] for i in picks]
        try:
            addresses = self.arena.append(blobs, tail=1)
        except MemoryError:  # it would only have saved memory
            self.abandon(job)
            return
        old = self.address[at], self.length[at], self.slot[at]
        self.address[at] = addresses
        self.length[at] = [len(blob) for blob in blobs]
        self.checksum[at] = [packed.checksums[i] for i in picks]
        self.slot[at] = [self.enter(packed.dictionaries[i]) for i in picks]
        self._release(*old)
        np.maximum.at(self.packed, job.lane[: job.done], job.chunk[: job.done] + 1)
        if job.finished and job.new is not None and isinstance(self.coder, ZstdCoder):
            self.coder.replace_unused(job.new)

    def abandon(self, job: RecompressJob) -> None:
        """Leave the chunks of a job as they are."""
        np.maximum.at(self.packed, job.lane, job.chunk + 1)

    # ---------------------------------------------------------------- reading

    def fetch(self, lane: Array, count: Array, present: Array, rows: Array, starts: Array) -> ChunkFetch:
        """Say how to fetch rows, as `ColumnData.fetch` describes it."""
        return fetch_chunks(self, lane, count, present, rows, starts)
