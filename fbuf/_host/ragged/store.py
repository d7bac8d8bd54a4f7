"""Store ragged rows (values of any shape, text, bytes, objects) behind tickets like those of `Store`.

Rows are written eagerly as Python values (`put`), or from jitted code as arrays padded to a leaf's largest shape (`try_write`),
and read as values (`values`) or padded (`read`). Tickets, lanes, expiry and all-or-nothing writes are those of
`fbuf._host.store.store`, whose columns need rows of one size.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fbuf._host.codecs import Codec
from fbuf._host.memory.arena import Arena, Spans
from fbuf._host.memory.lazy_array import Sources, expect, lazily
from fbuf._host.ragged import values
from fbuf._host.ragged.column import INDEX, OBJECT, STRING, RaggedColumn, RaggedLeaf, Staged, stage
from fbuf._host.ragged.values import MISSING
from fbuf._host.types import (
    Array,
    Batch,
    RowStore,
    StoreClosed,
    StoreCorrupted,
    Tickets,
    flat,
    ranges,
    records_errors,
    without_traceback,
)

FORMAT = 1
_PLAIN, _PACKED = b"\0", b"\1"
_MEASURED = 1 << 14  # values measured together when a store is loaded


class Records(RowStore):
    """Ragged rows of E lanes, readable by ticket from any thread.

    Args:
      leaves: What rows may hold, sorted by name or not.
      lanes: E.
      length: Rows a lane of the buffer holds.
      slack: Rows kept beyond that.
      encode, decode: For objects without bytes; None: the objects themselves are kept.
      codec: What compresses the bytes of each value, where that makes them fewer.

    Padded leaves are two columns each for `try_write` and `read`: the values `[*maximum]` and int32[rank], their lengths (-1
    where the row lacks the leaf).
    """

    def __init__(
        self,
        leaves: tuple[RaggedLeaf, ...],
        *,
        lanes: int,
        length: int,
        slack: int,
        encode: values.Encode | None = None,
        decode: values.Decode | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.leaves = leaves
        self.lanes = lanes
        self.length = length
        self.slack = slack
        self.depth = length + slack
        self.last_error: Exception | None = None
        self._encode, self._decode, self._codec = encode, decode, codec
        self._count: Array = np.zeros(lanes, np.int64)
        self._columns = [RaggedColumn(leaf, lanes, self.depth) for leaf in leaves]
        self._padded = [i for i, leaf in enumerate(leaves) if leaf.maximum is not None]
        self._arena = Arena()
        self._tickets = Tickets(lanes, self.depth, 0)
        self._writing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("Records: the store is closed; expected an open one. Make a new buffer with `init`.")

    # ---------------------------------------------------------------- writing

    def put(self, rows: Sequence[Sequence[Any]], number: int, keep: Array | None) -> Array:
        """Store rows; each gets a new ticket.

        Args:
          rows: Of each leaf N * E values, lanes side by side; MISSING where a row lacks it.
          number: N.
          keep: bool[N, E], or None for all.
        Returns:
          Tickets uint64[N, E], 0 where not kept.
        Raises:
          StoreClosed, and the errors of `encode` and the codec. Nothing was stored.
        Cost: about 2 us a value and its bytes copied.
        """
        with self._writing:
            self._check_open()
            kept = np.full(self.lanes, number, np.int64) if keep is None else keep.sum(axis=0, dtype=np.int64)
            before, after = self._count, self._count + kept
            batch = Batch([np.empty((number, self.lanes))], keep, before, after, False)
            step, lane, count = batch.places()
            tickets = self._tickets.of_batch(keep, number, before)
            new = count >= after[lane] - self.depth
            step, lane, count = step[new], lane[new], count[new]
            order = (step * self.lanes + lane).tolist()
            staged = [
                stage(leaf, [values[i] for i in order], self._encode, self._pack)
                for leaf, values in zip(self.leaves, rows, strict=True)
            ]
            with self._lock:
                gone = self._commit(staged, lane, count)
                self._count = after
            del gone  # outside the lock: finalizers of the user's objects may run code
        return tickets

    def _commit(self, staged: Sequence[Staged], lane: Array, count: Array) -> list[Any]:
        strings = [s for part in staged for s in part.strings]
        addresses, start, gone = self._arena.append(strings), 0, list[Any]()
        for column, part in zip(self._columns, staged, strict=True):
            stop = start + len(part.strings)
            gone += column.put(lane, count, part, addresses[start:stop], self._arena)
            start = stop
        segments = self._arena.sparse()
        if segments:
            with contextlib.suppress(MemoryError):  # it only saves memory
                for column in self._columns:
                    column.compact(self._arena, segments)
        return gone

    @records_errors
    def try_write(self, rows: Sequence[Array], keep: Array | None) -> tuple[Array, Exception | None]:
        """Store padded rows from jitted code: `[N, E, *maximum]` and int32[N, E, rank] of each padded leaf.

        Returns:
          Tickets as of `put`, and None; without memory tickets of 0, and the error. Nothing was stored then.
        Raises:
          ValueError: a length is beyond the maximum. Nothing was stored.
        """
        number = len(rows[0])
        try:
            values: list[list[Any]] = [[MISSING] * (number * self.lanes) for _ in self.leaves]
            for at, index in enumerate(self._padded):
                values[index] = self._cut(self.leaves[index], rows[2 * at], rows[2 * at + 1], keep)
            return self.put(values, number, keep), None
        except MemoryError as error:
            return np.zeros((number, self.lanes), np.uint64), without_traceback(error)

    def _cut(self, leaf: RaggedLeaf, padded: Array, lengths: Array, keep: Array | None) -> list[Any]:
        assert leaf.maximum is not None
        padded = padded.reshape(-1, *leaf.maximum)
        shapes = lengths.reshape(-1, len(leaf.maximum))
        kept = np.ones(len(shapes), bool) if keep is None else keep.reshape(-1)
        wrong = kept & (
            (shapes > np.array(leaf.maximum)).any(axis=1) | ((shapes < 0).any(axis=1) & (shapes[:, 0] != -1))
        )
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ValueError(
                f"Buffer.extend: leaf '{leaf.name}' of row {row} has lengths {shapes[row].tolist()}; expected at most "
                f"{list(leaf.maximum)}, its maximum (or -1 for a row that lacks it). Nothing was stored. Cut it, or use "
                f"storages.Ragged(maximum={{'{leaf.name}': {tuple(shapes[row].tolist())}}})."
            )
        found: list[Any] = []
        for row, shape, here in zip(padded, shapes.tolist(), kept.tolist(), strict=True):
            found.append(row[tuple(slice(n) for n in shape)] if here and shape[0] >= 0 else MISSING)
        return found

    def _pack(self, data: bytes) -> bytes:
        if self._codec is None:
            return _PLAIN + data
        packed = self._codec.encode(np.frombuffer(data, np.uint8)[None])
        if len(packed) + 8 >= len(data):
            return _PLAIN + data
        return _PACKED + len(data).to_bytes(8, "little") + packed

    # ---------------------------------------------------------------- reading

    def index(self, name: str) -> int:
        """Return the number of a leaf. Raises KeyError."""
        for i, leaf in enumerate(self.leaves):
            if leaf.name == name:
                return i
        raise KeyError(name)

    def _resolve(self, tickets: Array) -> tuple[Array, Array, Array]:
        """Return lane, count, and whether it is there (False for 0) of each ticket."""
        return self._tickets.find(tickets, self._count)

    def present(self, tickets: Array) -> Array:
        """Return bool of the tickets' shape: the row is there (False for 0)."""
        with self._lock:
            self._check_open()
            return self._resolve(tickets.reshape(-1))[2].reshape(tickets.shape)

    def has(self, index: int, tickets: Array) -> Array:
        """Return bool of the tickets' shape: the row is there and has the leaf."""
        with self._lock:
            self._check_open()
            lane, count, ok = self._resolve(tickets.reshape(-1))
            column = self._columns[index]
            return (ok & (column.kind[count % self.depth, lane] > 0)).reshape(tickets.shape)

    def values(self, index: int, tickets: Array) -> tuple[list[Any], Array]:
        """Return the values of one leaf, MISSING where a row lacks it or is not there; and bool[M], whether it is there.

        Raises:
          StoreCorrupted: a value's bytes are damaged.
          StoreClosed, and the errors of `decode`.
        Cost: about 2 us a value and a copy of its bytes.
        """
        tickets = tickets.reshape(-1)
        found: list[Any] = [MISSING] * len(tickets)
        with self._lock:
            self._check_open()
            lane, count, ok = self._resolve(tickets)
            column = self._columns[index]
            at, views, checksums, kind = self._strings(column, lane, count, ok)
            for i in np.flatnonzero(kind == OBJECT).tolist():
                found[i] = column.object(int(lane[i]), int(count[i]))
        for i, view, checksum in zip(at, views, checksums, strict=True):
            found[i] = values.decode(self._unpack(column.leaf, view, checksum), self._decode)
        return found, ok

    def _strings(
        self, column: RaggedColumn, lane: Array, count: Array, ok: Array
    ) -> tuple[list[int], list[memoryview], list[int], Array]:
        """Return which rows have a string, the strings, their checksums, and what every row has; `_lock` is held."""
        ring = count % self.depth
        kind = np.where(ok, column.kind[ring, lane], 0)
        at = np.flatnonzero(kind == STRING)
        where = ring[at], lane[at]
        views = self._arena.views(column.address[where], column.size[where].astype(np.int64))
        return at.tolist(), views, column.checksum[where].tolist(), kind

    def _unpack(self, leaf: RaggedLeaf, view: memoryview, checksum: int) -> memoryview:
        if zlib.crc32(view) != checksum or not len(view):
            raise StoreCorrupted(f"Records.read: a row's leaf '{leaf.name}' is damaged. Load the last checkpoint.")
        if view[:1] == _PLAIN:
            return view[1:]
        if self._codec is None or len(view) < 9:
            raise values.malformed("compressed, but there is no codec" if self._codec is None else f"{len(view)} bytes")
        out = np.empty((1, int.from_bytes(view[1:9], "little")), np.uint8)
        self._codec.decode(view[9:], out)
        return flat(out)

    @records_errors
    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fetch padded rows for jitted code.

        Args:
          requests: (column, tickets uint64[...], out `[..., *maximum]` or int32[..., rank]); zeros at ticket 0 and expired
            ones.
        Returns:
          bool[M], one request after another: False where the row has expired; True for ticket 0.
        """
        oks, jobs = [], list[Callable[[], None]]()
        with self._lock:
            self._check_open()
            for number, tickets, out in requests:
                flat = tickets.reshape(-1)
                column = self._columns[self._padded[number // 2]]
                lane, count, ok = self._resolve(flat)
                if number % 2:
                    assert column.lengths is not None
                    out[...] = np.where(ok[:, None], column.lengths[count % self.depth, lane], 0).reshape(out.shape)
                else:
                    jobs.append(self._padder(column, self._strings(column, lane, count, ok), len(flat), out))
                oks.append(ok | (flat == 0))
        for job in jobs:
            job()
        return np.concatenate(oks) if oks else np.ones(0, bool)

    def _padder(self, column: RaggedColumn, strings: Any, number: int, out: Array) -> Callable[[], None]:
        """Return the function that fills `out` after the lock is released."""

        def fill() -> None:
            out[...] = 0
            at, views, checksums, _ = strings
            rows = out.reshape(number, *column.leaf.maximum or ())
            for i, view, checksum in zip(at, views, checksums, strict=True):
                value = values.array(self._unpack(column.leaf, view, checksum))
                if value.dtype != out.dtype or any(a > b for a, b in zip(value.shape, rows.shape[1:], strict=True)):
                    raise values.malformed(f"{value.dtype}{list(value.shape)}")
                rows[(i, *(slice(n) for n in value.shape))] = value

        return fill

    # ---------------------------------------------------------------- size, end

    def with_capacity(self, length: int, slack: int) -> None:
        """Make room for more rows a lane; every ticket stays valid. Cost: O(rows held)."""
        with self._writing, self._lock:
            self._check_open()
            # Another future of the same rows may have made it deeper still.
            length, slack = max(length, self.length), max(slack, self.slack)
            lane, count = self._live()
            self._columns = [column.deeper(length + slack, lane, count) for column in self._columns]
            self.length, self.slack, self.depth = length, slack, length + slack
            self._tickets = Tickets(self.lanes, self.depth, 0)

    def _live(self) -> tuple[Array, Array]:
        """Return (lane, count) of every row that is there."""
        return ranges(np.maximum(self._count - self.depth, 0), self._count)

    @property
    def nbytes(self) -> int:
        """Return the bytes of segments (whole) and index; of objects that are not encoded the index only."""
        with self._lock:
            self._check_open()
            return self._nbytes()

    def _nbytes(self) -> int:
        touched = min(int(self._count.max()), self.depth)
        return self._arena.capacity + self._count.nbytes + sum(column.nbytes(touched) for column in self._columns)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return bytes in memory by leaf, index and values, and 0 on disk; free room in segments is not counted."""
        with self._lock:
            self._check_open()
            touched = min(int(self._count.max()), self.depth)
            values = {s.leaf.name: int(s.size[s.kind == STRING].sum(dtype=np.int64)) for s in self._columns}
            return {s.leaf.name: (s.nbytes(touched) + values[s.leaf.name], 0) for s in self._columns}

    def stats(self) -> dict[str, int]:
        """Count rows accepted and live, values stored as bytes, their bytes, objects, nbytes."""
        with self._lock:
            self._check_open()
            return {
                "rows_accepted": int(self._count.sum()),
                "rows_live": int(np.minimum(self._count, self.depth).sum()),
                "values": sum(int((column.kind == STRING).sum()) for column in self._columns),
                "payload_bytes": self._arena.live,
                "objects": sum(len(column.objects) for column in self._columns),
                "nbytes": self._nbytes(),
            }

    def close(self) -> None:
        """Free everything; later calls raise StoreClosed. Closing twice is fine."""
        with self._writing, self._lock:
            self._closed = True
            gone, self._columns, self._arena = self._columns, [], Arena()
        del gone

    # ---------------------------------------------------------------- checkpoints

    def to_arrays(self) -> dict[str, Any]:
        """Return everything as flat arrays of plain dtypes; the bytes of values are read on demand, as they are now.

        Raises:
          TypeError: a leaf holds objects that have no bytes.
        Cost: a copy of the index, 17 bytes a value.
        """
        with self._writing, self._lock:
            self._check_open()
            for column in self._columns:
                if column.objects:
                    kinds = sorted({type(value).__name__ for value in column.objects.values()})
                    raise TypeError(
                        f"Ragged.to_arrays: leaf '{column.leaf.name}' holds Python objects ({', '.join(kinds[:3])}) in "
                        f"{len(column.objects)} rows, which cannot be saved; expected text, bytes, numbers or arrays. Say how "
                        f"they become bytes: storages.Ragged(encode=..., decode=...)."
                    )
            head = [[leaf.name, leaf.kind, leaf.dtype, leaf.maximum] for leaf in self.leaves]
            nothing = np.zeros(0, np.uint64)
            span, payload = self._arena.saved(nothing, nothing)
            arrays: dict[str, Any] = {
                "geometry": np.array([FORMAT, self.lanes, self.length, self.slack], np.int64),
                "leaves": np.frombuffer(json.dumps(head).encode(), np.uint8),
                "count": self._count.copy(),
                "span": span,
                "payload": payload,
            }
            touched = min(int(self._count.max()), self.depth)
            for i, column in enumerate(self._columns):
                index = column.saved(touched)
                arrays |= {f"leaf{i}:{name}": array for name, array in index.items()}
            return arrays

    @classmethod
    def from_arrays(cls, arrays: Sources, *, lanes: int, length: int, slack: int, **functions: Any) -> Records:
        """Return the store on which `to_arrays` was called: the same tickets are readable, and writes continue.

        Raises:
          ValueError: the arrays are of another format or geometry, or do not fit together.
          StoreCorrupted: a padded leaf is damaged. Other damage is found when the value is read.
        """
        wanted = [FORMAT, lanes, length, slack]
        geometry = expect(arrays, "geometry", np.int64, (4,)).tolist()
        if geometry != wanted:
            raise ValueError(f"the records have format, lanes, length, slack {geometry}; expected {wanted}.")
        head = json.loads(bytes(expect(arrays, "leaves", np.uint8, (None,))).decode())
        leaves = tuple(RaggedLeaf(n, kind, dtype, None if cap is None else tuple(cap)) for n, kind, dtype, cap in head)
        for leaf in leaves:
            leaf.check()
        store = cls(leaves, lanes=lanes, length=length, slack=slack, **functions)
        store._count = expect(arrays, "count", np.int64, (lanes,)).copy()
        if (store._count < 0).any():
            raise ValueError("Records.from_arrays: count is negative; expected 0 or more. Load another checkpoint.")
        arena = store._arena
        span = Spans(expect(arrays, "span", np.int64, (None, 3)), arena.bits)
        touched = min(int(store._count.max()), store.depth)
        found = []
        for i, column in enumerate(store._columns):
            index = {name: expect(arrays, f"leaf{i}:{name}", dtype, (touched, lanes)) for name, dtype in INDEX.items()}
            address, size = column.load(index, store._count)
            span.find(address, size)
            found.append((address, size))
        payload = lazily(arrays, "payload", np.uint8, (span.total,))
        arena.adopt(span, payload, *(np.concatenate(parts) for parts in zip(*found, strict=True)))
        for column in store._columns:
            if column.lengths is not None:
                store._measure(column)
        return store

    def _measure(self, column: RaggedColumn) -> None:
        """Compute the lengths of a leaf's values, in a new store. Raises StoreCorrupted."""
        lane, count = self._live()
        assert column.lengths is not None
        for start in range(0, len(lane), _MEASURED):
            some, number = lane[start : start + _MEASURED], count[start : start + _MEASURED]
            column.lengths[number % self.depth, some] = -1
            at, views, checksums, _ = self._strings(column, some, number, np.ones(len(some), bool))
            for i, view, checksum in zip(at, views, checksums, strict=True):
                shape = values.array(self._unpack(column.leaf, view, checksum)).shape
                column.lengths[number[i] % self.depth, some[i]] = shape
