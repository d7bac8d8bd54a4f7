"""A host column as encoded chunks: k consecutive rows of a lane each, in an `Arena`, behind an index of numpy arrays.

The index is four arrays used as rings, 18 bytes a chunk: address, length, dictionary and a checksum of the *encoded* bytes.
That is a crc32 which begins with the dictionary's own, so that bytes which are damaged, swapped or paired with another
dictionary are noticed before they are decoded. Rejected: zstd's checksum of the decoded rows (as large, and a third of the
time of a read, because there are 50-200 times more of those); a Python object a chunk (weighs half as much as the chunk).

"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fbuf._host.arena import Arena
from fbuf._host.batch import Batch, ranges
from fbuf._host.codec import (
    PROBE_BYTES,
    PROBE_CHUNKS,
    WORTHWHILE,
    Array,
    Codec,
    Coder,
    Dictionary,
    Zstd,
    checksum,
    coder_of,
)
from fbuf._host.filearena import FileArena
from fbuf._host.part import Census
from fbuf._host.plan import Plan, plan

_INDEX_BYTES = 18  # a chunk


@dataclass
class Staged:
    """A batch encoded for one column, not yet visible."""

    lanes: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    dictionaries: list[Dictionary | None] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    addresses: Array | None = None
    incompressible: bool = False


class Chunks:
    """The newest `depth` rows of each lane, k rows an encoded chunk; the chunk still filling is raw."""

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        lanes: int,
        depth: int,
        arena: Arena | FileArena | None = None,
    ) -> None:
        self.k = codec.chunk
        self.lanes = lanes
        self.depth = depth
        self.row = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.coder: Coder = coder_of(codec, shape, dtype, depth * lanes)
        self.arena: Any = Arena() if arena is None else arena
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

    # ---------------------------------------------------------------- size

    def span(self, count: Array) -> tuple[Array, Array]:
        """First live and first unclosed chunk of each lane when it has `count` rows."""
        return np.maximum(count - self.depth, 0) // self.k, count // self.k

    def live(self, count: Array) -> tuple[Array, Array]:
        """(lane, chunk) of all closed live chunks, oldest first."""
        lane, chunk = ranges(*self.span(count))
        order = np.argsort(chunk, kind="stable")
        return lane[order], chunk[order]

    def size(self, count: Array) -> int:
        """Segments (capacity), index rows written to, dictionaries, context, open chunks."""
        used = min(int(count.max(initial=0)) // self.k, self.ring)
        total = self.arena.memory + self.open.nbytes + self.coder.nbytes + _INDEX_BYTES * self.lanes * used
        held = {id(d): d.nbytes for d in self.table.values()}
        if self.coder.current is not None:
            held[id(self.coder.current)] = self.coder.current.nbytes
        return total + sum(held.values())

    def census(self, count: Array) -> Census:
        """Closed chunks, their bytes, and dictionaries with live chunks."""
        start, stop = self.span(count)
        return Census(int((stop - start).sum()), self.arena.live, len(self.table))

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
                staged.checksums.append(checksum(blob, dictionary))
                encoded += len(blob)
                raw += data.nbytes
                total = self.closed + len(staged.blobs)
                seen = total * k * self.row >= PROBE_BYTES or total >= PROBE_CHUNKS
                if seen and not self.probed:
                    if not self._worthwhile(batch, staged, self.encoded + encoded, total):
                        staged.incompressible = True  # asked again if the write fails
                        return staged
                    self.probed = True
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

        decode = self.coder.decoder()

        def fetch(i: int) -> memoryview:
            if i < old:
                at = chunk[i] % self.ring, lane[i]
                data = self.arena.view(int(self.address[at]), int(self.length[at]))
                return decode(data, int(self.checksum[at]), self.table.get(int(self.slot[at])))
            return decode(memoryview(staged.blobs[i - old]), staged.checksums[i - old], staged.dictionaries[i - old])

        return self.coder.renew(total * self.k, old + len(staged.blobs), fetch)

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
            self._evict(*ranges(tail, gone))
        if staged.blobs:
            assert staged.addresses is not None
            at = np.array(staged.chunks, np.int64) % self.ring, np.array(staged.lanes, np.int64)
            self.address[at] = staged.addresses
            self.length[at] = [len(b) for b in staged.blobs]
            self.checksum[at] = staged.checksums
            self.slot[at] = [self.enter(d) for d in staged.dictionaries]
            self.closed += len(staged.blobs)
            self.encoded += sum(len(b) for b in staged.blobs)
        self._fill(batch, rows, new_head)

    def enter(self, dictionary: Dictionary | None) -> int:
        """The slot of a dictionary that one more live chunk needs."""
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
        moved = self.arena.within(self.address[chunk % self.ring, lane], numbers)
        at = chunk[moved] % self.ring, lane[moved]
        old, length = self.address[at], self.length[at]
        try:
            self.address[at] = self.arena.move(old, length)
        except (MemoryError, OSError):  # it only saves memory
            return
        self.arena.release(old, length)

    # ---------------------------------------------------------------- reading

    def fetch(self, lane: Array, count: Array, there: Array, rows: Array, starts: Array) -> Plan:
        """How to fetch rows, as `Part.fetch` describes it."""
        return plan(self, lane, count, there, rows, starts)
