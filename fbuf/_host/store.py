"""The host side-store: rows behind numbers (tickets), numpy in and numpy out, for the callbacks of jitted code.

Every row the store accepts gets a ticket that is never used again, so two futures of one buffer state draw different
ones and cannot read each other's rows; the newest `length + slack` rows of each lane can be read, older ones have
expired: zeros and False, never other data. A stream ticket is `count * E + lane + 1`; a changed row (`patch`) is kept
beside the stream under a ticket with bit 63 set, until the row it replaced expires, and holds the changed columns only.

One lock for writers, held while they encode; one for bookkeeping, held for a fraction of a millisecond; decoding holds
neither. Rejected: one lock (a reader would wait for the compression of a batch) and a decode pool (no gain measured:
the Python between two decompressions holds the GIL).
"""

from __future__ import annotations

import functools
import heapq
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

from fbuf._host.arena import Batch, Chunks, Plan, Ring, Staged, expect
from fbuf._host.codec import Array, Codec, StoreCorrupted, Zstd, flat

F = TypeVar("F", bound=Callable[..., Any])

PATCH = 1 << 63
_PATCH_OVERHEAD = 600  # bytes of Python objects a patch takes, about
_FORMAT = 1


class StoreClosed(RuntimeError):
    """The store was closed; its rows are gone."""


@dataclass(frozen=True)
class Column:
    """One leaf kept on the host."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: Codec | None  # None: as it is, in a ring

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.dtype.hasobject:
            raise TypeError(
                f"Column: column '{self.name}' is {self.dtype}; expected numbers or booleans. "
                f"Keep Python objects in a list of your own."
            )
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(
                f"Column: codec of '{self.name}' is {self.codec!r}; expected a value with chunk, encode and decode. "
                f"Use Zstd()."
            )
        if self.codec is not None and self.codec.chunk < 1:
            raise ValueError(
                f"Column: codec of '{self.name}' has chunk {self.codec.chunk}; expected 1 or more. Use Zstd(chunk=8)."
            )

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass
class _Patch:
    """A changed row: the row of the stream it comes from, and the columns that differ from it."""

    lane: int
    count: int
    blobs: dict[int, bytes]
    superseded: int = -1  # patches made when another patch replaced this one


def _recorded(method: F) -> F:
    """Keeps what a call raises as `last_error`: JAX turns exceptions of callbacks into text."""

    @functools.wraps(method)
    def call(self: Store, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.last_error = error
            raise

    return cast(F, call)


class Store:
    """Rows of some columns, E lanes, readable by ticket from any thread.

    Args:
      columns: The leaves, at least one.
      lanes: E.
      length: Rows a lane of the buffer holds.
      slack: Rows kept beyond that, for states a little old.
      first_seq: Count of the first row of each lane.
    Raises:
      ValueError: no columns, lanes or length < 1, slack or first_seq < 0.
    """

    def __init__(
        self,
        columns: tuple[Column, ...],
        *,
        lanes: int,
        length: int,
        slack: int,
        first_seq: int = 0,
    ) -> None:
        for name, value, least in (
            ("columns", len(columns), 1),
            ("lanes", lanes, 1),
            ("length", length, 1),
            ("slack", slack, 0),
            ("first_seq", first_seq, 0),
        ):
            if value < least:
                raise ValueError(f"Store: {name} is {value}; expected {least} or more. Pass {name}={least}.")
        self.columns = tuple(columns)
        self.lanes = lanes
        self.length = length
        self.slack = slack
        self.depth = length + slack
        self.last_error: Exception | None = None
        self._base = first_seq * lanes + 1  # ticket of the first row of lane 0
        self._count: Array = np.zeros(lanes, np.int64)  # rows accepted, by lane, from first_seq on
        self._parts: list[Ring | Chunks] = [self._part(c) for c in self.columns]
        self._patches: dict[int, _Patch] = {}
        self._origins: dict[tuple[int, int], list[int]] = {}  # patches by the row they come from
        self._heaps: dict[int, list[int]] = {}  # counts of those rows by lane, oldest first
        self._superseded: deque[int] = deque()
        self._patch_count = 0
        self._patch_bytes = 0
        self._writing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._closed = False

    def _part(self, column: Column) -> Ring | Chunks:
        if column.codec is None or column.nbytes == 0:
            return Ring(column.shape, column.dtype, self.lanes, self.depth)
        return Chunks(column.codec, column.shape, column.dtype, self.lanes, self.depth)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("Store: the store is closed; expected an open one. Make a new buffer with `init`.")

    # ---------------------------------------------------------------- writing

    @_recorded
    def write(self, rows: Sequence[Array], keep: Array | None) -> Array:
        """Takes rows in; each gets a new ticket.

        Args:
          rows: One array a column, `[N, E, *shape]`, of the column's dtype. Not kept.
          keep: bool[N, E], or None for all.
        Returns:
          Tickets uint64[N, E], 0 where not kept.
        Raises:
          ValueError, TypeError: shapes or dtypes do not fit. Nothing was stored, as with any exception.
          StoreClosed: after `close`.
        Cost: about 3 to 5 us a frame of 84x84 with Zstd, one copy without codec; some 20 us a call.
        """
        keep = self._check_rows(rows, keep)
        n = len(rows[0])
        with self._writing:
            self._check_open()
            kept = np.full(self.lanes, n, np.int64) if keep is None else keep.sum(axis=0, dtype=np.int64)
            before, after = self._count, self._count + kept
            if n == 0 or (keep is not None and not keep.any()):
                return np.zeros((n, self.lanes), np.uint64)
            level = keep is None and bool((before == before[0]).all())
            batch = Batch(rows, keep, before, after, level)
            parts, staged = list(self._parts), list[Staged | None]()
            for i, part in enumerate(parts):
                stage = part.stage(batch, rows[i]) if isinstance(part, Chunks) else None
                if stage is not None and stage.incompressible:
                    parts[i], stage = self._as_ring(i), None
                staged.append(stage)
            with self._lock:
                self._reserve(parts, staged)
                self._count = after
                for i, part in enumerate(parts):
                    if isinstance(part, Chunks):
                        part.commit(batch, rows[i], cast(Staged, staged[i]))
                    else:
                        part.commit(batch, rows[i])
                self._parts = parts
                self._expire_patches()
                for part in parts:
                    if isinstance(part, Chunks):
                        try:
                            part.compact(after)
                        except MemoryError:  # it only saves memory
                            pass
        return self._tickets(keep, n, before)

    @staticmethod
    def _reserve(parts: list[Ring | Chunks], staged: list[Staged | None]) -> None:
        try:
            for part, stage in zip(parts, staged, strict=True):
                if isinstance(part, Chunks):
                    part.reserve(cast(Staged, stage))
        except BaseException:
            for part, stage in zip(parts, staged, strict=True):
                if isinstance(part, Chunks):
                    part.cancel(cast(Staged, stage))
            raise

    def _tickets(self, keep: Array | None, n: int, before: Array) -> Array:
        if keep is None:
            count = before + np.arange(n)[:, None]
        else:
            count = before + np.cumsum(keep, axis=0) - 1
        ticket = count.astype(np.uint64) * np.uint64(self.lanes)
        ticket += np.arange(self.lanes, dtype=np.uint64) + np.uint64(self._base)
        return ticket if keep is None else np.where(keep, ticket, np.uint64(0))

    def _check_rows(self, rows: Sequence[Array], keep: Array | None) -> Array | None:
        if len(rows) != len(self.columns):
            raise ValueError(
                f"Store.write: rows has {len(rows)} arrays; expected {len(self.columns)}, one a column. "
                f"Pass [{', '.join(c.name for c in self.columns)}]."
            )
        n = np.shape(rows[0])[0] if np.ndim(rows[0]) else 0
        for column, array in zip(self.columns, rows, strict=True):
            _check(
                "Store.write",
                f"column '{column.name}'",
                array,
                column.dtype,
                (n, self.lanes, *column.shape),
            )
        if keep is None:
            return None
        _check("Store.write", "keep", keep, np.dtype(bool), (n, self.lanes))
        return None if keep.all() else keep

    def _as_ring(self, index: int) -> Ring:
        """The rows of a column that turned out not to compress, as they are."""
        column = self.columns[index]
        part = cast(Chunks, self._parts[index])
        ring = Ring(column.shape, column.dtype, self.lanes, self.depth)
        low = np.maximum(self._count - self.depth, 0)
        size = self._count - low
        lane = np.repeat(np.arange(self.lanes), size)
        count = np.arange(len(lane)) - np.repeat(np.cumsum(size) - size, size) + low[lane]
        values: Array = np.empty((len(lane), *column.shape), column.dtype)
        start = np.zeros(1, np.int64)
        plan = part.locate(lane, count, np.ones(len(lane), bool), self._count, start)
        plan.run([flat(values)])
        ring.array[count % self.depth, lane] = values
        ring.touched = min(int(self._count.max()), self.depth)
        return ring

    # ---------------------------------------------------------------- reading

    @_recorded
    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fetches rows by ticket; chunks that several requests of a column need are decoded once.

        Args:
          requests: (column, tickets uint64[...], out `[..., *shape]`), out C-contiguous and writeable; every byte of
            it is written. Ticket 0, an expired and an unknown one give zeros.
        Returns:
          bool[M], one request after another: False where the row has expired or never was; True for ticket 0.
        Raises:
          StoreCorrupted: stored bytes are damaged; `out` is then undefined.
          ValueError, TypeError, StoreClosed: as for `write`.
        Cost: for 256 pairs of 4-stacks of 84x84 about 5 ms with Zstd: three quarters of it zstd.
        """
        for index, tickets, out in requests:
            self._check_request(index, tickets, out)
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t, _ in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)  # rows that are there, ticket 0 is not
        plans: list[tuple[list[int], Plan]] = []
        gathers: list[tuple[int, Ring, Array, Array]] = []  # request, ring, lane, count
        patched: list[tuple[int, int, int, bytes]] = []  # request, place in it, column, value
        with self._lock:
            self._check_open()
            for column in sorted({c for c, _, _ in requests}):
                group = [i for i, request in enumerate(requests) if request[0] == column]
                sizes = [wanted[i].size for i in group]
                starts = np.cumsum([0, *sizes[:-1]])
                tickets = np.concatenate([wanted[i] for i in group]) if len(group) > 1 else wanted[group[0]]
                lane, count, there, changed = self._resolve(column, tickets)
                part = self._parts[column]
                pieces = [slice(b, b + n) for b, n in zip(starts.tolist(), sizes, strict=True)]
                for i, piece in zip(group, pieces, strict=True):
                    present[i] = there[piece].copy()
                    if isinstance(part, Ring):
                        gathers.append((i, part, lane[piece], count[piece]))
                    for at, value in changed:
                        if piece.start <= at < piece.stop:
                            patched.append((i, at - piece.start, column, value))
                if isinstance(part, Chunks):
                    there[[at for at, _ in changed]] = False
                    plans.append((group, part.locate(lane, count, there, self._count, starts)))
        for group, plan in plans:
            plan.run([flat(requests[i][2]) for i in group])
        for i, ring, lane, count in gathers:
            ring.gather(lane, count, requests[i][2])
        if gathers:
            with self._lock:  # rows overwritten while they were copied have expired by now
                low = np.maximum(self._count - self.depth, 0)
            for i, _, lane, count in gathers:
                present[i] &= count >= low[lane]
        for i, at, column, value in patched:
            if present[i][at]:
                row = self.columns[column].nbytes
                self._decode_patch(column, value, flat(requests[i][2])[at * row : (at + 1) * row])
        for (_, _, out), there in zip(requests, present, strict=True):
            if not there.all() and out.nbytes:
                out.reshape(-1).view(np.uint8).reshape(len(there), -1)[~there] = 0
        oks = [there | (t == 0) for there, t in zip(present, wanted, strict=True)]
        return np.concatenate(oks) if oks else np.ones(0, bool)

    def _resolve(self, column: int, tickets: Array) -> tuple[Array, Array, Array, list[tuple[int, bytes]]]:
        """Of every ticket: lane, count, whether it is there (False for 0); and the patched values among them."""
        stream = tickets
        found: list[tuple[int, bytes]] = []
        is_patch = tickets >= np.uint64(PATCH)
        if is_patch.any():
            stream = tickets.copy()
            for at in np.flatnonzero(is_patch).tolist():
                patch = self._patches.get(int(tickets[at]))
                stream[at] = 0 if patch is None else patch.count * self.lanes + patch.lane + self._base
                if patch is not None and column in patch.blobs:
                    found.append((at, patch.blobs[column]))
        # uint64 wraps below the base, to counts beyond any lane's.
        number = stream - np.uint64(self._base)
        if self.lanes == 1:
            count, lane = number, np.zeros(number.shape, np.int64)
        else:
            count, rest = np.divmod(number, np.uint64(self.lanes))
            lane = rest.astype(np.int64)
        high = self._count.astype(np.uint64)
        low = np.maximum(self._count - self.depth, 0).astype(np.uint64)
        ok = (count < high[lane]) & (count >= low[lane])
        return np.where(ok, lane, 0), np.where(ok, count, 0).astype(np.int64), ok, found

    def _check_request(self, index: int, tickets: Array, out: Array) -> None:
        if not 0 <= index < len(self.columns):
            raise ValueError(
                f"Store.read: column is {index}; expected 0 to {len(self.columns) - 1}. "
                f"Columns are {[c.name for c in self.columns]}."
            )
        column = self.columns[index]
        _check("Store.read", "tickets", tickets, np.dtype(np.uint64), tickets.shape)
        _check(
            "Store.read",
            f"out of '{column.name}'",
            out,
            column.dtype,
            (*tickets.shape, *column.shape),
        )
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(
                f"Store.read: out of '{column.name}' is strided or read-only; expected a C-contiguous writeable array. "
                f"Allocate it with np.empty({tuple(out.shape)}, {column.dtype.name!r})."
            )

    # ---------------------------------------------------------------- changed rows

    @_recorded
    def patch(self, tickets: Array, keep: Array, fields: Mapping[int, Array]) -> Array:
        """Stores rows again with some columns replaced; the old tickets stay readable.

        Args:
          tickets: uint64[B].
          keep: bool[B].
          fields: By column, `[B, *shape]`.
        Returns:
          New tickets uint64[B]; the old one where `keep` is False, for ticket 0 and for expired rows.
        Raises:
          ValueError, TypeError, StoreClosed: as for `write`.
        Cost: one Python object and one small frame a row: for corrections, not for streams.
        """
        _check("Store.patch", "tickets", tickets, np.dtype(np.uint64), tickets.shape[:1])
        _check("Store.patch", "keep", keep, np.dtype(bool), tickets.shape)
        for index, values in fields.items():
            if not 0 <= index < len(self.columns):
                raise ValueError(
                    f"Store.patch: column is {index}; expected 0 to {len(self.columns) - 1}. "
                    f"Columns are {[c.name for c in self.columns]}."
                )
            column = self.columns[index]
            _check(
                "Store.patch",
                f"column '{column.name}'",
                values,
                column.dtype,
                (len(tickets), *column.shape),
            )
        new = tickets.copy()
        with self._writing:
            self._check_open()
            # Only writers drop rows, so what is there now is there until `_writing` is released.
            lane, count, there, _ = self._resolve(0, tickets)
            picks = np.flatnonzero(there & keep).tolist()
            made: list[tuple[int, _Patch]] = []
            for at in picks:
                old = self._patches.get(int(tickets[at]))
                blobs = dict(old.blobs) if old else {}
                blobs |= {c: self._encode_patch(c, v[at]) for c, v in fields.items()}
                made.append((at, _Patch(int(lane[at]), int(count[at]), blobs)))
            with self._lock:
                for at, patch in made:
                    self._patch_count += 1
                    self._insert_patch(PATCH | self._patch_count, patch)
                    self._supersede(int(tickets[at]))
                    new[at] = PATCH | self._patch_count
                self._drop_superseded()
        return new

    def _encode_patch(self, column: int, value: Array) -> bytes:
        """One row, with a byte that says how: dictionaries come and go with chunks, so a row stands alone."""
        raw = bytes(flat(np.ascontiguousarray(value)))
        codec = self.columns[column].codec
        if isinstance(codec, Zstd) and len(raw) >= 64:
            packed = codec.encode(np.frombuffer(raw, np.uint8))
            if len(packed) < len(raw):
                return b"\1" + packed
        return b"\0" + raw

    def _decode_patch(self, column: int, value: bytes, target: memoryview) -> None:
        data, codec = memoryview(value)[1:], self.columns[column].codec
        if value[0] == 1 and isinstance(codec, Zstd):
            codec.decode(data, np.frombuffer(target, np.uint8))
        elif value[0] == 0 and len(data) == len(target):
            target[:] = data
        else:
            raise StoreCorrupted(
                f"Store.read: a changed row of '{self.columns[column].name}' is damaged; expected {len(target)} bytes. "
                f"Load the last checkpoint with fbuf.load(path)."
            )

    def _insert_patch(self, ticket: int, patch: _Patch) -> None:
        self._patches[ticket] = patch
        self._patch_bytes += _PATCH_OVERHEAD + sum(map(len, patch.blobs.values()))
        origin = patch.lane, patch.count
        if origin not in self._origins:
            self._origins[origin] = []
            heapq.heappush(self._heaps.setdefault(patch.lane, []), patch.count)
        self._origins[origin].append(ticket)

    def _remove_patch(self, ticket: int) -> None:
        patch = self._patches.pop(ticket)
        self._patch_bytes -= _PATCH_OVERHEAD + sum(map(len, patch.blobs.values()))

    def _supersede(self, ticket: int) -> None:
        patch = self._patches.get(ticket)
        if patch is not None and patch.superseded < 0:
            patch.superseded = self._patch_count
            self._superseded.append(ticket)

    def _drop_superseded(self) -> None:
        while self._superseded:
            ticket = self._superseded[0]
            patch = self._patches.get(ticket)
            if patch is not None:
                if self._patch_count - patch.superseded < max(self.slack, 1):
                    return
                # Its successor has the same origin, so the origin's list does not run empty.
                self._origins[patch.lane, patch.count].remove(ticket)
                self._remove_patch(ticket)
            self._superseded.popleft()

    def _expire_patches(self) -> None:
        for lane in list(self._heaps):
            heap, low = self._heaps[lane], int(self._count[lane]) - self.depth
            while heap and heap[0] < low:
                for ticket in self._origins.pop((lane, heapq.heappop(heap))):
                    self._remove_patch(ticket)
            if not heap:
                del self._heaps[lane]

    # ---------------------------------------------------------------- checkpoints

    @_recorded
    def to_arrays(self) -> dict[str, Array]:
        """Everything as flat arrays of plain dtypes, copied; chunks stay encoded."""
        with self._writing, self._lock:
            self._check_open()
            geometry = [_FORMAT, self.lanes, self.length, self.slack, self._patch_count]
            arrays: dict[str, Array] = {
                "geometry": np.array(geometry, np.int64),
                "first": np.array([(self._base - 1) // self.lanes], np.uint64),
                "count": self._count.copy(),
            }
            for i, part in enumerate(self._parts):
                arrays |= {f"column{i}:{n}": a for n, a in part.to_arrays(self._count).items()}
            held = list(self._patches.items())
            blobs = [(row, c, b) for row, (_, p) in enumerate(held) for c, b in p.blobs.items()]
            arrays["patch:row"] = np.array(
                [(t & ~PATCH, p.lane, p.count, p.superseded) for t, p in held], np.int64
            ).reshape(-1, 4)
            arrays["patch:value"] = np.array([(r, c, len(b)) for r, c, b in blobs], np.int64).reshape(-1, 3)
            arrays["patch:data"] = np.frombuffer(b"".join(b for _, _, b in blobs), np.uint8)
            return arrays

    @classmethod
    def from_arrays(
        cls,
        columns: tuple[Column, ...],
        arrays: Mapping[str, Array],
        *,
        lanes: int,
        length: int,
        slack: int,
    ) -> Store:
        """The store `to_arrays` was called on: the same tickets readable, writes go on.

        Raises:
          ValueError: the arrays are of another format or geometry, or do not fit together. Damaged chunks are found
            when they are read.
        """
        geometry = expect(arrays, "geometry", np.int64, (5,)).tolist()
        if geometry[:4] != [_FORMAT, lanes, length, slack]:
            raise ValueError(
                f"Store.from_arrays: format, lanes, length and slack are {geometry[:4]}; "
                f"expected {[_FORMAT, lanes, length, slack]}. Load with the buffer that was saved."
            )
        first = int(expect(arrays, "first", np.uint64, (1,))[0])
        store = cls(columns, lanes=lanes, length=length, slack=slack, first_seq=first)
        store._count = expect(arrays, "count", np.int64, (lanes,)).copy()
        if (store._count < 0).any():
            raise ValueError("Store.from_arrays: count is negative; expected 0 or more. Load another checkpoint.")
        for i, column in enumerate(store.columns):
            prefix = f"column{i}:"
            own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            if "rows" in own:  # also a column with a codec, if its rows did not compress
                store._parts[i] = Ring(column.shape, column.dtype, lanes, store.depth)
            store._parts[i].load(own, store._count)
        store._load_patches(arrays, geometry[4])
        return store

    def _load_patches(self, arrays: Mapping[str, Array], patch_count: int) -> None:
        rows = expect(arrays, "patch:row", np.int64, (None, 4)).tolist()
        values = expect(arrays, "patch:value", np.int64, (None, 3))
        data = bytes(expect(arrays, "patch:data", np.uint8, (int(values[:, 2].sum()),)))
        low = np.maximum(self._count - self.depth, 0)
        for number, lane, count, superseded in rows:
            fits = 0 <= lane < self.lanes and low[lane] <= count < self._count[lane] and 0 < number <= patch_count
            if not fits or superseded > patch_count:
                raise ValueError(
                    f"Store.from_arrays: patch:row has {[number, lane, count, superseded]}; expected a row of the store. "
                    f"Load another checkpoint."
                )
        blobs: list[dict[int, bytes]] = [{} for _ in rows]
        end = 0
        for row, column, size in values.tolist():
            if not (0 <= row < len(rows) and 0 <= column < len(self.columns) and size >= 1):
                raise ValueError(
                    f"Store.from_arrays: patch:value has {[row, column, size]}; expected a changed row and a column. "
                    f"Load another checkpoint."
                )
            blobs[row][column] = data[end : end + size]
            end += size
        for (number, lane, count, superseded), own in zip(rows, blobs, strict=True):
            self._insert_patch(PATCH | number, _Patch(lane, count, own, superseded))
        order = sorted((p.superseded, t) for t, p in self._patches.items() if p.superseded >= 0)
        self._superseded.extend(t for _, t in order)
        self._patch_count = patch_count

    # ---------------------------------------------------------------- size, end

    @property
    def nbytes(self) -> int:
        """Bytes held: segments (whole), index, dictionaries, contexts, open chunks, rings (as far as written), changes.

        Decompressors live for one `read` only and are not counted (96 KB each).
        """
        with self._lock:
            self._check_open()
            return self._nbytes()

    def _nbytes(self) -> int:
        total = self._count.nbytes + self._patch_bytes
        for part in self._parts:
            total += part.nbytes(self._count) if isinstance(part, Chunks) else part.nbytes
        return total

    @_recorded
    def stats(self) -> dict[str, int]:
        """Counts: rows accepted and live, chunks and their payload, raw bytes of live rows, dictionaries, patches, nbytes."""
        with self._lock:
            self._check_open()
            live = int(np.minimum(self._count, self.depth).sum())
            parts = [p for p in self._parts if isinstance(p, Chunks)]
            spans = [p.span(self._count) for p in parts]
            return {
                "rows_accepted": int(self._count.sum()),
                "rows_live": live,
                "chunks": sum(int((stop - start).sum()) for start, stop in spans),
                "payload_bytes": sum(p.arena.live for p in parts),
                "raw_bytes": live * sum(c.nbytes for c in self.columns),
                "dictionaries": sum(len(p.table) for p in parts),
                "patches": len(self._patches),
                "nbytes": self._nbytes(),
            }

    def close(self) -> None:
        """Frees everything; reads under way finish, later calls raise StoreClosed. Closing twice is fine."""
        with self._writing, self._lock:
            self._closed = True
            self._parts = []
            self._patches, self._origins, self._heaps = {}, {}, {}
            self._superseded.clear()
            self._patch_bytes = 0


def _check(call: str, what: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{call}: {what} is {type(array).__name__}; expected a numpy array. Convert with np.asarray(x)."
        )
    if array.dtype != dtype:
        raise TypeError(f"{call}: {what} is {array.dtype}; expected {dtype}. Cast with x.astype({dtype.name!r}).")
    if array.shape != shape:
        raise ValueError(
            f"{call}: {what} has shape {list(array.shape)}; expected {list(shape)}. "
            f"Give it that shape with x.reshape({list(shape)})."
        )
