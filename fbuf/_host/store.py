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

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from fbuf._host import checkpoint
from fbuf._host.batch import Batch, ranges
from fbuf._host.blocks import Blocked, Blocks
from fbuf._host.changelog import ChangeLog
from fbuf._host.checkpoint import expect
from fbuf._host.chunks import Chunks
from fbuf._host.codec import Array, StoreCorrupted, flat
from fbuf._host.column import Column, check_patch, check_request, check_rows
from fbuf._host.filechunks import FileChunks
from fbuf._host.filering import FileRing
from fbuf._host.folder import CHUNKS, NOTHING, RING, Folder
from fbuf._host.part import Fetch, Part
from fbuf._host.patches import PATCH, Patch, Patches
from fbuf._host.ring import Ring

__all__ = ["PATCH", "Column", "Store", "StoreClosed"]

F = TypeVar("F", bound=Callable[..., Any])


class StoreClosed(RuntimeError):
    """The store was closed; its rows are gone."""


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


def _intact(damaged: Array | None, there: Array) -> None:
    """Raises StoreCorrupted if a row that is there is damaged."""
    if damaged is not None and (damaged & there).any():
        raise StoreCorrupted(
            f"Store.read: {int((damaged & there).sum())} rows have blocks with other checksums than they were stored "
            f"with; expected the same. Their bytes were damaged: load the last checkpoint with fbuf.load(path)."
        )


def _kind(part: Part) -> bytes:
    """How a folder names a part."""
    return CHUNKS if isinstance(part, FileChunks) else RING if isinstance(part, FileRing) else NOTHING


class Store:
    """Rows of some columns, E lanes, readable by ticket from any thread.

    Args:
      columns: The leaves, at least one.
      lanes: E.
      length: Rows a lane of the buffer holds.
      slack: Rows kept beyond that, for states a little old.
      first_seq: Count of the first row of each lane.
      folder: Where the rows lie in files; with a store in it that is to go on, its rows. None: in memory.
    Raises:
      ValueError: no columns, lanes or length < 1, slack or first_seq < 0.
      OSError: a file cannot be made.
      StoreCorrupted: the files of a folder are damaged. Damaged chunks are found when they are read.
    """

    def __init__(
        self,
        columns: tuple[Column, ...],
        *,
        lanes: int,
        length: int,
        slack: int,
        first_seq: int = 0,
        folder: Folder | None = None,
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
        self._folder = folder
        self._parts: list[Part] = [self._part(c) for c in self.columns]
        self._patches = Patches([c.codec for c in self.columns], slack)
        self._log: ChangeLog | None = None
        self._writing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._closed = False
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Folder) -> None:
        """Takes the rows that lie in a folder."""
        self._log = ChangeLog(folder)
        if folder.fresh:
            return
        self._count = folder.count.copy()
        for i, part in enumerate(self._parts):
            if isinstance(part, FileChunks):
                part.resume(self._count)
            else:
                folder.delete_chunks(f"column{i}")
        low = np.maximum(self._count - self.depth, 0)
        self._log.load(self._patches, low, self._count, len(self.columns))

    def _file_part(self, folder: Folder, column: Column, kind: bytes, batch: int = 0) -> Part:
        index = self.columns.index(column)
        name, fresh = f"column{index}", folder.fresh or batch > 0
        if kind == RING:
            path = folder.file(f"{name}.rows")
            return FileRing(path, column.shape, column.dtype, self.lanes, self.depth, fresh=fresh, batch=batch)
        assert kind == CHUNKS and column.codec is not None
        return FileChunks(folder, name, column.codec, column.shape, column.dtype, self.lanes, self.depth, fresh=fresh)

    def _part(self, column: Column) -> Part:
        if self._folder is not None and column.nbytes:
            index = self.columns.index(column)
            return self._file_part(self._folder, column, self._folder.kinds[index : index + 1])
        if column.codec is None or column.nbytes == 0:
            return Ring(column.shape, column.dtype, self.lanes, self.depth)
        if isinstance(column.codec, Blocks):
            return Blocked(column.codec, column.shape, column.dtype, self.lanes, self.depth)
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
        Cost: about 2.5 to 4 us a frame of 84x84 with Zstd, one copy without codec; some 20 us a call.
        """
        keep = check_rows(self.columns, self.lanes, rows, keep)
        n = len(rows[0])
        with self._writing:
            self._check_open()
            if self._folder is None:
                return self._write(rows, keep)
            tickets: list[Array] = []
            done = 0
            while done < n or not tickets:
                # In files rows are written before they count, where none lie that can be read.
                room = min((p.room(self._count) for p in self._parts if isinstance(p, FileRing)), default=n)
                piece = slice(done, min(done + room, n))
                try:
                    tickets.append(self._write([r[piece] for r in rows], None if keep is None else keep[piece]))
                except OSError as error:
                    if done:
                        error.strerror = f"{error.strerror} The first {done} of {n} rows were written before."
                    raise
                done = piece.stop
        return np.concatenate(tickets)

    def _write(self, rows: Sequence[Array], keep: Array | None) -> Array:
        """`write`, of checked rows, all or nothing; `_writing` is held."""
        n = len(rows[0])
        kept = np.full(self.lanes, n, np.int64) if keep is None else keep.sum(axis=0, dtype=np.int64)
        before, after = self._count, self._count + kept
        if n == 0 or (keep is not None and not keep.any()):
            return np.zeros((n, self.lanes), np.uint64)
        level = keep is None and bool((before == before[0]).all())
        batch = Batch(rows, keep, before, after, level)
        parts, staged = list(self._parts), list[Any]()
        with self._undone(parts, staged):
            for i, part in enumerate(parts):
                stage = part.stage(batch, rows[i])
                if stage.incompressible:
                    parts[i] = self._as_ring(i, n)
                    stage = parts[i].stage(batch, rows[i])
                staged.append(stage)
            if self._folder is not None:  # readers need not wait for a disk: what they see changes in memory only
                self._reserve(parts, staged)
                self._folder.save(b"".join(map(_kind, parts)), after)
        with self._lock:
            if self._folder is None:
                with self._undone(parts, staged):
                    self._reserve(parts, staged)
            self._count = after
            for part, array, stage in zip(parts, rows, staged, strict=True):
                part.commit(batch, array, stage)
            replaced = [i for i, part in enumerate(parts) if part is not self._parts[i]]
            self._parts = parts
            self._patches.expire(after - self.depth)
            for part in parts:
                part.compact(after)
        for i in replaced:
            if self._folder is not None:
                self._folder.delete_chunks(f"column{i}")
        return self._tickets(keep, n, before)

    @staticmethod
    def _reserve(parts: list[Part], staged: list[Any]) -> None:
        for part, stage in zip(parts, staged, strict=True):
            part.reserve(stage)

    @staticmethod
    @contextlib.contextmanager
    def _undone(parts: list[Part], staged: list[Any]) -> Iterator[None]:
        """What was staged is cancelled if this fails."""
        try:
            yield
        except BaseException:
            for part, stage in zip(parts, staged, strict=False):
                part.cancel(stage)
            raise

    def _tickets(self, keep: Array | None, n: int, before: Array) -> Array:
        if keep is None:
            count = before + np.arange(n)[:, None]
        else:
            count = before + np.cumsum(keep, axis=0) - 1
        ticket = count.astype(np.uint64) * np.uint64(self.lanes)
        ticket += np.arange(self.lanes, dtype=np.uint64) + np.uint64(self._base)
        return ticket if keep is None else np.where(keep, ticket, np.uint64(0))

    def _as_ring(self, index: int, batch: int) -> Ring | FileRing:
        """The rows of a column that turned out not to compress, as they are, with room for a batch of so many."""
        column = self.columns[index]
        ring: Any = None
        if self._folder is not None:
            ring = self._file_part(self._folder, column, RING, batch)
        else:
            ring = Ring(column.shape, column.dtype, self.lanes, self.depth)
        low = np.maximum(self._count - self.depth, 0)
        lane, count = ranges(low, self._count)
        values: Array = np.empty((len(lane), *column.shape), column.dtype)
        there, start = np.ones(len(lane), bool), np.zeros(1, np.int64)
        _intact(self._parts[index].fetch(lane, count, there, self._count, start).run([flat(values)]), there)
        ring.put(lane, count, values)
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
        Cost: for 256 pairs of 4-stacks of 84x84 about 3 ms with Zstd, half of it in zstd; some 100 us a call.
        """
        for index, tickets, out in requests:
            check_request(self.columns, index, tickets, out)
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t, _ in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)  # rows that are there, ticket 0 is not
        fetches: list[tuple[Fetch, list[int], list[slice], Array, Array]] = []  # its requests, their rows, lane, count
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
                    for at, value in changed:
                        if piece.start <= at < piece.stop:
                            patched.append((i, at - piece.start, column, value))
                there[[at for at, _ in changed]] = False
                fetches.append((part.fetch(lane, count, there, self._count, starts), group, pieces, lane, count))
        wrong = [fetch.run([flat(requests[i][2]) for i in group]) for fetch, group, *_ in fetches]
        if any(fetch.volatile for fetch, *_ in fetches):
            with self._lock:  # rows overwritten while they were copied have expired by now
                low = np.maximum(self._count - self.depth, 0)
            for (fetch, group, pieces, lane, count), bad in zip(fetches, wrong, strict=True):
                if fetch.volatile:
                    lasting = count >= low[lane]
                    _intact(bad, lasting)
                    for i, piece in zip(group, pieces, strict=True):
                        present[i] &= lasting[piece]
        for i, at, column, value in patched:
            if present[i][at]:
                row = self.columns[column].nbytes
                self._patches.decode(column, value, flat(requests[i][2])[at * row : (at + 1) * row])
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
                patch = self._patches.held.get(int(tickets[at]))
                stream[at] = 0 if patch is None else patch.count * self.lanes + patch.lane + self._base
                if patch is not None and column in patch.values:
                    found.append((at, patch.values[column]))
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

    def newest(self) -> tuple[Array, Array]:
        """Rows of each lane, int64[E], and tickets uint64[length, E] of the newest `length` of them: row `count` at
        `count % length`, as a new state of them has it; of a row that was changed the last change. 0: none.
        """
        with self._lock:
            self._check_open()
            tickets = np.zeros((self.length, self.lanes), np.uint64)
            low = np.maximum(self._count - self.length, 0)
            lane, count = ranges(low, self._count)
            tickets[count % self.length, lane] = (count * self.lanes + lane + self._base).astype(np.uint64)
            for ticket, patch in sorted(self._patches.held.items()):
                if patch.count >= low[patch.lane]:
                    tickets[patch.count % self.length, patch.lane] = ticket
            return self._count.copy(), tickets

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
        check_patch(self.columns, tickets, keep, fields)
        new = tickets.copy()
        with self._writing:
            self._check_open()
            # Only writers drop rows, so what is there now is there until `_writing` is released.
            lane, count, there, _ = self._resolve(0, tickets)
            picks = np.flatnonzero(there & keep).tolist()
            made: list[tuple[int, Patch]] = []
            for at in picks:
                old = int(tickets[at])
                values = {c: v[at] for c, v in fields.items()}
                made.append((old, self._patches.prepare(old, int(lane[at]), int(count[at]), values)))
            if self._log is not None and made:
                self._log.append(self._patches.made + 1, [patch for _, patch in made])
            with self._lock:
                new[picks] = np.array(self._patches.add(made), np.uint64)
            if self._log is not None:
                self._log.tidy(self._patches)
        return new

    # ---------------------------------------------------------------- checkpoints

    @_recorded
    def to_arrays(self) -> dict[str, Array]:
        """Everything as flat arrays of plain dtypes, copied; chunks stay encoded."""
        with self._writing, self._lock:
            self._check_open()
            arrays: dict[str, Array] = {
                "geometry": np.array([checkpoint.FORMAT, self.lanes, self.length, self.slack], np.int64),
                "first": np.array([(self._base - 1) // self.lanes], np.uint64),
                "count": self._count.copy(),
            }
            for i, part in enumerate(self._parts):
                arrays |= {f"column{i}:{n}": a for n, a in checkpoint.save(part, self._count).items()}
            return arrays | checkpoint.save_patches(self._patches)

    @classmethod
    def from_arrays(
        cls,
        columns: tuple[Column, ...],
        arrays: Mapping[str, Array],
        *,
        lanes: int,
        length: int,
        slack: int,
        folder: Folder | None = None,
    ) -> Store:
        """The store `to_arrays` was called on: the same tickets readable, writes go on.

        Raises:
          ValueError: the arrays are of another format or geometry, or do not fit together.
          StoreCorrupted: a dictionary is damaged. Damaged chunks are found when they are read.
        """
        wanted = [checkpoint.FORMAT, lanes, length, slack]
        geometry = expect(arrays, "geometry", np.int64, (4,)).tolist()
        if geometry != wanted:
            raise ValueError(
                f"Store.from_arrays: format, lanes, length and slack are {geometry}; expected {wanted}. "
                f"Load with the buffer that was saved."
            )
        first = int(expect(arrays, "first", np.uint64, (1,))[0])
        store = cls(columns, lanes=lanes, length=length, slack=slack, first_seq=first, folder=folder)
        store._count = expect(arrays, "count", np.int64, (lanes,)).copy()
        if (store._count < 0).any():
            raise ValueError("Store.from_arrays: count is negative; expected 0 or more. Load another checkpoint.")
        for i, column in enumerate(store.columns):
            prefix = f"column{i}:"
            own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            if "rows" in own:  # also a column with a codec, if its rows did not compress
                if folder is None or not column.nbytes:
                    store._parts[i] = Ring(column.shape, column.dtype, lanes, store.depth)
                elif not isinstance(store._parts[i], FileRing):
                    store._parts[i] = store._file_part(folder, column, RING)
            checkpoint.load(store._parts[i], own, store._count)
        low = np.maximum(store._count - store.depth, 0)
        checkpoint.load_patches(store._patches, arrays, low, store._count, len(store.columns))
        if folder is not None and store._log is not None:
            store._log.write(store._patches)
            folder.save(b"".join(map(_kind, store._parts)), store._count)
        return store

    # ---------------------------------------------------------------- size, end

    @property
    def nbytes(self) -> int:
        """Bytes held: segments (whole), index, dictionaries, contexts, open chunks, tables of blocks (with their empty places),
        rings (as far as written), changes.

        Decompressors live for one `read` only and are not counted (96 KB each).
        """
        with self._lock:
            self._check_open()
            return self._nbytes()

    def _nbytes(self) -> int:
        total = self._count.nbytes + self._patches.nbytes
        for part in self._parts:
            total += part.size(self._count)
        return total

    @property
    def disk(self) -> int:
        """Bytes of files, as far as blocks were allocated for them; 0 without a folder."""
        self._check_open()
        return 0 if self._folder is None else self._folder.nbytes

    @_recorded
    def stats(self) -> dict[str, int]:
        """Counts: rows accepted and live, chunks and their payload, raw bytes of live rows, dictionaries, patches, nbytes."""
        with self._lock:
            self._check_open()
            live = int(np.minimum(self._count, self.depth).sum())
            chunks, payload, dictionaries = map(sum, zip(*(p.census(self._count) for p in self._parts), strict=True))
            return {
                "rows_accepted": int(self._count.sum()),
                "rows_live": live,
                "chunks": chunks,
                "payload_bytes": payload,
                "raw_bytes": live * sum(c.nbytes for c in self.columns),
                "dictionaries": dictionaries,
                "patches": len(self._patches.held),
                "nbytes": self._nbytes(),
            }

    def close(self) -> None:
        """Frees everything; reads under way finish, later calls raise StoreClosed. Closing twice is fine."""
        with self._writing, self._lock:
            self._closed = True
            self._parts = []
            self._patches = Patches([c.codec for c in self.columns], self.slack)
            self._log = None
            if self._folder is not None:
                self._folder.close()
