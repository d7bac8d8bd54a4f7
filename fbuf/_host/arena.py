"""Where the rows of one column lie: a raw `Ring`, or `Chunks` of encoded bytes in an `Arena`.

Rows of a lane are counted from 0; a chunk is k consecutive ones. Encoded chunks are appended to byte segments and
their bytes are never overwritten, so a reader decodes outside the store's lock: it holds memoryviews, and a segment freed
meanwhile lives until the last of them is gone. The index is three numpy arrays used as rings, 14 bytes a
chunk. Rejected: a list of `bytes` (41 bytes of overhead each), one preallocated byte ring (a lane that stalls blocks it).

Writing is in three steps, so that an exception leaves the column as it was: `stage` encodes (slow, changes nothing that
readers see), `reserve` allocates, `commit` cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fbuf._host.codec import (
    PROBE_BYTES,
    PROBE_CHUNKS,
    WORTHWHILE,
    Array,
    Codec,
    Coder,
    Dictionary,
    coder_of,
    flat,
)

_OFFSET_BITS = 24  # an address is segment << 24 | offset
_SMALL, _LARGE = 32 * 1024, 256 * 1024
"""Bytes of a segment; in between a 48th of what is stored: small ones lose half a chunk each, large ones their tail."""


class Segment:
    """A stretch of bytes, append-only."""

    __slots__ = ("array", "view", "bytes", "chunks")

    def __init__(self, size: int) -> None:
        self.array: Array = np.empty(size, np.uint8)
        self.view = flat(self.array)
        self.bytes = 0  # of live chunks
        self.chunks = 0


class Arena:
    """Byte strings by address; a segment is freed with its last string."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.capacity = 0  # bytes allocated
        self.live = 0  # bytes in use
        self._next = 0
        self._tail = -1
        self._offset = 0
        self.grown = False  # a segment was added since compaction was last considered

    def append(self, blobs: Sequence[bytes | memoryview]) -> Array:
        """Addresses uint64[len(blobs)]. On MemoryError nothing is stored."""
        addresses = np.empty(len(blobs), np.uint64)
        done = 0
        try:
            for i, blob in enumerate(blobs):
                size = len(blob)
                segment = self.segments.get(self._tail)
                if segment is None or self._offset + size > len(segment.array) or self._offset >> _OFFSET_BITS:
                    segment = self._grow(size)
                segment.view[self._offset : self._offset + size] = blob
                addresses[i] = self._tail << _OFFSET_BITS | self._offset
                segment.bytes += size
                segment.chunks += 1
                self.live += size
                self._offset += size
                done += 1
        except BaseException:
            self.release(addresses[:done], np.array([len(b) for b in blobs[:done]], np.int64))
            raise
        return addresses

    def _grow(self, least: int) -> Segment:
        size = min(max(self.live // 48, _SMALL), _LARGE) + 4095 & ~4095
        segment = Segment(max(size, least))
        self._drop_if_empty(self._tail, force=True)
        self._tail, self._offset, self._next = self._next, 0, self._next + 1
        self.segments[self._tail] = segment
        self.capacity += len(segment.array)
        self.grown = True
        return segment

    def _drop_if_empty(self, number: int, force: bool = False) -> None:
        segment = self.segments.get(number)
        if segment is not None and segment.chunks == 0 and (force or number != self._tail):
            self.capacity -= len(segment.array)
            del self.segments[number]

    def release(self, addresses: Array, lengths: Array) -> None:
        """Gives up strings; cost: a few numpy calls and one step per segment touched."""
        if not addresses.size:
            return
        numbers, inverse = np.unique(addresses >> np.uint64(_OFFSET_BITS), return_inverse=True)
        counts = np.bincount(inverse.reshape(-1)).tolist()
        sizes = np.bincount(inverse.reshape(-1), lengths).astype(np.int64).tolist()
        for number, count, size in zip(numbers.tolist(), counts, sizes, strict=True):
            segment = self.segments[number]
            segment.chunks -= count
            segment.bytes -= size
            self.live -= size
            self._drop_if_empty(number)

    def sparse(self) -> list[int]:
        """Segments worth emptying: less than half used, when a quarter of all is waste.

        Without this a lane that gets few rows would keep whole segments alive for one chunk each.
        """
        if not self.grown or self.capacity - self.live <= max(self.live // 4, 4 * _SMALL):
            return []
        self.grown = False
        return [n for n, s in self.segments.items() if n != self._tail and 2 * s.bytes < len(s.array)]


@dataclass
class Batch:
    """Rows on their way in, `[N, E, *shape]` a column, and where they go."""

    rows: Sequence[Array]
    keep: Array | None  # bool[N, E]; None: all
    before: Array  # int64[E], rows of each lane until now
    after: Array  # int64[E]
    uniform: bool  # all lanes are level and keep all, so that slices will do
    _picks: dict[int, Array] = field(default_factory=dict)
    _places: tuple[Array, Array, Array] | None = None

    def places(self) -> tuple[Array, Array, Array]:
        """Of every kept row: its place on axis 0, its lane, its count in the lane."""
        if self._places is None:
            n, e = self.rows[0].shape[:2]
            if self.keep is None:
                step, lane = np.divmod(np.arange(n * e), e)
                count = self.before[lane] + step
            else:
                step, lane = np.nonzero(self.keep)
                count = (self.before + np.cumsum(self.keep, axis=0) - 1)[step, lane]
            self._places = step, lane, count
        return self._places

    def lane(self, rows: Array, lane: int, start: int, stop: int) -> Array:
        """Kept rows start..stop of a lane, C-contiguous; a view where the input allows."""
        if self.keep is None:
            return np.ascontiguousarray(rows[start:stop, lane])
        picks = self._picks.get(lane)
        if picks is None:
            picks = self._picks[lane] = np.flatnonzero(self.keep[:, lane])
        return np.ascontiguousarray(rows[picks[start:stop], lane])


class Ring:
    """The newest `depth` rows of each lane, as they are. Pages are committed as they are first written."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], lanes: int, depth: int) -> None:
        self.array: Array = np.empty((depth, lanes, *shape), dtype)
        self.row = self.array.nbytes // (depth * lanes)
        self.depth = depth
        self.lanes = lanes
        self.touched = 0  # rows a lane written so far, at most depth

    @property
    def nbytes(self) -> int:
        """Bytes written to so far; the rest of the array is address space only."""
        return self.array.nbytes // max(self.depth, 1) * self.touched

    def commit(self, batch: Batch, rows: Array) -> None:
        """Takes the newest rows of a batch."""
        depth, array = self.depth, self.array
        self.touched = min(max(self.touched, int(batch.after.max())), depth)
        if batch.uniform:
            stop = int(batch.after[0])
            start = max(int(batch.before[0]), stop - depth)
            rows = rows[len(rows) - (stop - start) :]
            first = start % depth
            head = min(depth - first, len(rows))
            array[first : first + head] = rows[:head]
            array[: len(rows) - head] = rows[head:]
            return
        step, lane, count = batch.places()
        new = count >= batch.after[lane] - depth
        array[count[new] % depth, lane[new]] = rows[step[new], lane[new]]

    def to_arrays(self, count: Array) -> dict[str, Array]:
        """The rows written to so far, as bytes."""
        used = self.array[: self.touched]
        return {"rows": used.copy().reshape(-1).view(np.uint8).reshape(self.touched, self.lanes, self.row)}

    def load(self, arrays: Mapping[str, Array], count: Array) -> None:
        """The inverse of `to_arrays`, into a new ring."""
        touched = min(int(count.max()), self.depth)
        rows = expect(arrays, "rows", np.uint8, (touched, self.lanes, self.row))
        if self.array.nbytes:
            self.array[:touched].reshape(-1).view(np.uint8)[:] = rows.reshape(-1)
        self.touched = touched

    def gather(self, lane: Array, count: Array, out: Array) -> None:
        """Copies rows, `count` int64[M] clipped into range by the caller, into `out` `[M, *shape]`."""
        if not out.nbytes:
            return
        at = count % self.depth * self.lanes + lane
        table = self.array.reshape(-1).view(np.uint8).reshape(self.depth * self.lanes, -1)
        # mode="raise", the default, would gather into a temporary first.
        np.take(table, at, axis=0, out=out.reshape(-1).view(np.uint8).reshape(len(at), -1), mode="clip")


@dataclass
class Staged:
    """A batch encoded for one column, not yet visible."""

    lanes: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    dictionaries: list[Dictionary | None] = field(default_factory=list)
    addresses: Array | None = None
    incompressible: bool = False


class Chunks:
    """The newest `depth` rows of each lane, k rows an encoded chunk; the chunk still filling is raw."""

    def __init__(self, codec: Codec, shape: tuple[int, ...], dtype: np.dtype[Any], lanes: int, depth: int) -> None:
        self.k = codec.chunk
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.coder: Coder = coder_of(codec, shape, dtype, depth * lanes)
        self.arena = Arena()
        self.open: Array = np.empty((lanes, self.k, *shape), dtype)
        self.table: dict[int, Dictionary] = {}  # dictionaries with live chunks, by slot >= 1
        self.ring = depth // self.k + 2
        self.address = np.zeros((self.ring, lanes), np.uint64)
        self.length = np.zeros((self.ring, lanes), np.uint32)
        self.slot = np.zeros((self.ring, lanes), np.uint16)
        self.closed = 0  # chunks ever encoded
        self.encoded = 0  # and their bytes
        self.probed = False

    # ---------------------------------------------------------------- size

    def span(self, count: Array) -> tuple[Array, Array]:
        """First live and first unclosed chunk of each lane when it has `count` rows."""
        return np.maximum(count - self.depth, 0) // self.k, count // self.k

    def live(self, count: Array) -> tuple[Array, Array]:
        """(lane, chunk) of all closed live chunks, oldest first."""
        lane, chunk = _ranges(*self.span(count))
        order = np.argsort(chunk, kind="stable")
        return lane[order], chunk[order]

    def nbytes(self, count: Array) -> int:
        """Segments (capacity), index rows written to, dictionaries, context, open chunks."""
        used = min(int(count.max(initial=0)) // self.k, self.ring)
        total = self.arena.capacity + self.open.nbytes + self.coder.nbytes + 14 * self.lanes * used
        held = {id(d): d.nbytes for d in self.table.values()}
        if self.coder.current is not None:
            held[id(self.coder.current)] = self.coder.current.nbytes
        return total + sum(held.values())

    # ---------------------------------------------------------------- writing

    def stage(self, batch: Batch, rows: Array) -> Staged:
        """Encodes the chunks a batch completes. Readers see no change, whatever happens here."""
        k, staged = self.k, Staged()
        first = batch.before // k
        stop = batch.after // k
        if not (stop > first).any():
            return staged
        # Rows that fill an open chunk go to places above the lane's count, which no reader looks at.
        self._fill(batch, rows, first, only=stop > first)
        oldest = self.span(batch.after)[0]
        start = np.maximum(first, oldest)
        encoded = raw = 0
        for turn in range(int((stop - start).max())):  # time order, so that dictionaries see every lane
            for lane in np.flatnonzero(start + turn < stop).tolist():
                chunk = int(start[lane]) + turn
                at = chunk * k - int(batch.before[lane])
                data = self.open[lane] if at < 0 else batch.lane(rows, lane, at, at + k)
                dictionary = self.coder.current
                blob = self.coder.encode(data)
                staged.lanes.append(lane)
                staged.chunks.append(chunk)
                staged.blobs.append(blob)
                staged.dictionaries.append(dictionary)
                encoded += len(blob)
                raw += data.nbytes
                total = self.closed + len(staged.blobs)
                seen = total * k * self.row >= PROBE_BYTES or total >= PROBE_CHUNKS
                if seen and not self.probed:
                    self.probed = True
                    if not self._worthwhile(batch, staged, self.encoded + encoded, total):
                        staged.incompressible = True
                        return staged
                if self.coder.due(total * k):
                    self._renew(batch, staged, total)
        return staged

    def _worthwhile(self, batch: Batch, staged: Staged, encoded: int, total: int) -> bool:
        """Whether the column compresses; rows that only repeat one another may need a dictionary to."""
        if total * self.k * self.row >= WORTHWHILE * encoded:
            return True
        mean = self._renew(batch, staged, total)
        return mean is not None and self.k * self.row >= WORTHWHILE * mean

    def _renew(self, batch: Batch, staged: Staged, total: int) -> float | None:
        lane, chunk = self.live(batch.before)
        old = len(lane)

        def fetch(i: int) -> tuple[memoryview, Dictionary | None]:
            if i >= old:
                return memoryview(staged.blobs[i - old]), staged.dictionaries[i - old]
            return self._stored(int(lane[i]), int(chunk[i]))

        return self.coder.renew(total * self.k, old + len(staged.blobs), fetch)

    def _stored(self, lane: int, chunk: int) -> tuple[memoryview, Dictionary | None]:
        at = chunk % self.ring, lane
        number, offset = divmod(int(self.address[at]), 1 << _OFFSET_BITS)
        view = self.arena.segments[number].view[offset : offset + int(self.length[at])]
        return view, self.table.get(int(self.slot[at]))

    def _fill(self, batch: Batch, rows: Array, chunk: Array, only: Array | None = None) -> None:
        """Puts into the open chunk of each lane its rows of that chunk."""
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

    def reserve(self, staged: Staged) -> None:
        """Stores the bytes. The last step that can fail; `cancel` undoes it."""
        if staged.blobs:
            staged.addresses = self.arena.append(staged.blobs)

    def cancel(self, staged: Staged) -> None:
        """Undoes `reserve`."""
        if staged.addresses is not None:
            self.arena.release(staged.addresses, np.array([len(b) for b in staged.blobs], np.int64))

    def commit(self, batch: Batch, rows: Array, staged: Staged) -> None:
        """Makes a staged batch readable and drops what has expired."""
        tail, head = self.span(batch.before)
        new_tail, new_head = self.span(batch.after)
        gone = np.minimum(new_tail, head)
        if (gone > tail).any():
            self._evict(*_ranges(tail, gone))
        if staged.blobs:
            assert staged.addresses is not None
            at = np.array(staged.chunks, np.int64) % self.ring, np.array(staged.lanes, np.int64)
            self.address[at] = staged.addresses
            self.length[at] = [len(b) for b in staged.blobs]
            self.slot[at] = [self._enter(d) for d in staged.dictionaries]
            self.closed += len(staged.blobs)
            self.encoded += sum(len(b) for b in staged.blobs)
        self._fill(batch, rows, new_head)

    def _enter(self, dictionary: Dictionary | None) -> int:
        if dictionary is None:
            return 0
        if dictionary.count == 0:
            dictionary.slot = next(i for i in range(1, 1 << 16) if i not in self.table)
            self.table[dictionary.slot] = dictionary
        dictionary.count += 1
        return dictionary.slot

    def _evict(self, lane: Array, chunk: Array) -> None:
        at = chunk % self.ring, lane
        self.arena.release(self.address[at], self.length[at])
        slots, counts = np.unique(self.slot[at], return_counts=True)
        for slot, n in zip(slots.tolist(), counts.tolist(), strict=True):
            if slot:
                self.table[slot].count -= n
                if self.table[slot].count == 0:
                    del self.table[slot]

    def compact(self, count: Array) -> None:
        """Moves chunks out of segments that are mostly empty."""
        numbers = self.arena.sparse()
        if not numbers:
            return
        lane, chunk = self.live(count)
        at = chunk % self.ring, lane
        moved = np.isin(self.address[at] >> np.uint64(_OFFSET_BITS), numbers)
        lane, chunk = lane[moved], chunk[moved]
        at = chunk % self.ring, lane
        pairs = zip(lane.tolist(), chunk.tolist(), strict=True)
        addresses = self.arena.append([self._stored(e, c)[0] for e, c in pairs])
        self.arena.release(self.address[at], self.length[at])
        self.address[at] = addresses

    # ---------------------------------------------------------------- checkpoints

    def to_arrays(self, count: Array) -> dict[str, Array]:
        """Live chunks as they are, oldest first, with their dictionaries and the open chunks."""
        lane, chunk = self.live(count)
        at = chunk % self.ring, lane
        books = list(self.table.values())
        if self.coder.current is not None and self.coder.current not in books:
            books.append(self.coder.current)
        number = {0: 0} | {d.slot: i for i, d in enumerate(books, 1) if d.slot in self.table}
        current = books.index(self.coder.current) + 1 if self.coder.current is not None else 0
        contents = [d.data.as_bytes() for d in books]
        payload = b"".join(self._stored(e, c)[0] for e, c in zip(lane.tolist(), chunk.tolist(), strict=True))
        slots = [number[s] for s in self.slot[at].tolist()]
        return {
            "state": np.array([self.k, self.closed, self.encoded, self.probed, current], np.int64),
            "open": np.array(flat(self.open)).reshape(self.lanes, self.k, self.row),
            "length": self.length[at],
            "dictionary": np.array(slots, np.uint16),
            "payload": np.frombuffer(payload, np.uint8),
            "dictionaries": np.frombuffer(b"".join(contents), np.uint8),
            "dictionary_length": np.array([len(c) for c in contents], np.int64),
        }

    def load(self, arrays: Mapping[str, Array], count: Array) -> None:
        """The inverse of `to_arrays`, into new chunks."""
        k, closed, encoded, probed, current = expect(arrays, "state", np.int64, (5,)).tolist()
        if k != self.k:
            raise ValueError(
                f"Store.from_arrays: chunks hold {k} rows; expected {self.k}. Load with the codec that was saved."
            )
        opened = expect(arrays, "open", np.uint8, (self.lanes, k, self.row))
        flat(self.open)[:] = flat(np.ascontiguousarray(opened))
        lane, chunk = self.live(count)
        length = expect(arrays, "length", np.uint32, (len(lane),))
        slot = expect(arrays, "dictionary", np.uint16, (len(lane),))
        payload = expect(arrays, "payload", np.uint8, (int(length.sum(dtype=np.int64)),))
        sizes = expect(arrays, "dictionary_length", np.int64, (None,))
        contents = bytes(expect(arrays, "dictionaries", np.uint8, (int(sizes.sum()),)))
        if (sizes < 1).any() or int(slot.max(initial=0)) > len(sizes) or not 0 <= current <= len(sizes):
            raise ValueError(
                f"Store.from_arrays: chunks name {int(slot.max(initial=0))} dictionaries; expected at most {len(sizes)}. "
                f"Load another checkpoint."
            )
        ends = np.cumsum(sizes).tolist()
        books = [None] + [Dictionary(contents[b - n : b]) for b, n in zip(ends, sizes.tolist(), strict=True)]
        view, stops = flat(np.ascontiguousarray(payload)), np.cumsum(length, dtype=np.int64)
        blobs = [view[a:b] for a, b in zip((stops - length).tolist(), stops.tolist(), strict=True)]
        at = chunk % self.ring, lane
        self.address[at] = self.arena.append(blobs)
        self.length[at] = length
        self.slot[at] = [self._enter(books[s]) for s in slot.tolist()]
        self.closed, self.encoded, self.probed = closed, encoded, bool(probed)
        self.coder.adopt(books[current], closed * k)

    # ---------------------------------------------------------------- reading

    def locate(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> Plan:
        """Says how to fetch rows; the store's lock is held.

        Args:
          lane: int64[M], of every row of every request, one request after another.
          count: int64[M], its count in the lane.
          there: bool[M], whether to fetch it at all.
          rows: int64[E], rows of each lane now.
          starts: int64[R], where each request begins.
        """
        k = self.k
        chunk, at = np.divmod(count, k)
        is_open = chunk == (rows // k)[lane]
        key = np.where(is_open, self.ring, chunk % self.ring) * self.lanes + lane
        # A run is consecutive rows of one chunk that go to consecutive places: one copy.
        breaks = np.ones(len(lane), bool)
        breaks[1:] = (key[1:] != key[:-1]) | (at[1:] != at[:-1] + 1) | (there[1:] != there[:-1])
        breaks[starts[starts < len(lane)]] = True
        begin = np.flatnonzero(breaks)
        size = np.diff(begin, append=len(lane))
        wanted = there[begin]
        begin, size = begin[wanted], size[wanted]
        order = np.argsort(key[begin], kind="stable")
        begin, size = begin[order], size[order]
        keys = key[begin]
        fresh = np.ones(len(keys), bool)
        fresh[1:] = keys[1:] != keys[:-1]
        request = np.searchsorted(starts, begin, side="right") - 1
        to = (begin - starts[request]) * self.row
        source = at[begin] * self.row
        unique = keys[fresh]
        closed = unique[unique < self.ring * self.lanes]
        address = self.address.reshape(-1)[closed]
        numbers = (address >> np.uint64(_OFFSET_BITS)).tolist()
        low = (address & np.uint64((1 << _OFFSET_BITS) - 1)).astype(np.int64)
        high = low + self.length.reshape(-1)[closed]
        slots = self.slot.reshape(-1)[closed].tolist()
        segments = {n: self.arena.segments[n].view for n in set(numbers)}
        blobs = [
            (segments[n][a:b], self.table.get(s))
            for n, a, b, s in zip(numbers, low.tolist(), high.tolist(), slots, strict=True)
        ]
        # The store keeps filling open chunks: take a copy now. Their keys are the largest, so they come last.
        opened = [flat(self.open[e].copy()) for e in (unique[len(closed) :] - self.ring * self.lanes).tolist()]
        moves = zip(
            fresh.tolist(),
            request.tolist(),
            to.tolist(),
            (to + size * self.row).tolist(),
            source.tolist(),
            (source + size * self.row).tolist(),
            strict=True,
        )
        return Plan(self.coder, blobs, opened, moves)


@dataclass
class Plan:
    """Bytes to decode and where their rows go. Runs without the store's lock; holds what it reads alive."""

    coder: Coder
    blobs: list[tuple[memoryview, Dictionary | None]]
    opened: list[memoryview]
    moves: Iterator[tuple[bool, int, int, int, int, int]]

    def run(self, outs: Sequence[memoryview]) -> None:
        """Fills the requests' outputs, decoding every chunk once. Raises what the codec raises on damaged bytes."""
        chunks = self._decoded()
        data = memoryview(b"")
        for fresh, request, to, to_end, source, source_end in self.moves:
            if fresh:
                data = next(chunks)
            outs[request][to:to_end] = data[source:source_end]

    def _decoded(self) -> Iterator[memoryview]:
        if self.blobs:
            decode = self.coder.decoder()
            for blob, dictionary in self.blobs:
                yield decode(blob, dictionary)
        yield from self.opened


def expect(arrays: Mapping[str, Array], name: str, dtype: type[np.generic], shape: tuple[int | None, ...]) -> Array:
    """An array of a checkpoint, if it is what it should be; None takes any size."""
    if name not in arrays:
        raise ValueError(f"Store.from_arrays: '{name}' is missing; expected an array. Load another checkpoint.")
    array = arrays[name]
    sizes = len(array.shape) == len(shape) and all(
        want in (None, have) for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not sizes:
        raise ValueError(
            f"Store.from_arrays: '{name}' is {array.dtype}{list(array.shape)}; "
            f"expected {np.dtype(dtype)}{list(shape)}. Load another checkpoint."
        )
    return array


def _ranges(start: Array, stop: Array) -> tuple[Array, Array]:
    """(lane, number) for start[lane] <= number < stop[lane]."""
    size = np.maximum(stop - start, 0)
    lane = np.repeat(np.arange(len(size)), size)
    within = np.arange(len(lane)) - np.repeat(np.cumsum(size) - size, size)
    return lane, start[lane] + within
