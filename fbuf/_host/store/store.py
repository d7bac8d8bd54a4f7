"""The host side-store: rows behind numbers (tickets), numpy in and numpy out, for the callbacks of jitted code.

Every row the store accepts gets a ticket that is never used again, so two futures of one buffer state draw different
ones and cannot read each other's rows; the newest `length + slack` rows of each lane can be read, older ones have
expired: zeros and False, never other data. A stream ticket is `count * E + lane + 1`; a changed row (`patch`) is kept
beside the stream under a ticket with bit 63 set, until the row it replaced expires, and holds the changed columns only.

Where rows are no streams, because a writer replaces any of them, they lie in places (`fbuf._host.store.slot_map`). To the
columns these are the counts of a single lane, of which every one up to the last that was ever taken holds a row.

With a folder (`fbuf._host.io.directory`) the columns lie in files, and what a write adds is there before it counts.

One lock for writers, held while they encode; one for bookkeeping, held for a fraction of a millisecond; decoding holds
neither. A third, taken before both, is for whoever compresses closed chunks again: a thread that lives as long as there is
something to do (`fbuf._host.columns.recompress`). Another thread reads ahead where that is asked for
(`fbuf._host.store.read_ahead`). Rejected: one lock (a reader would wait for the compression of a batch) and a decode pool (no
gain measured: the Python between two decompressions holds the GIL).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from fbuf._host.batch import Batch, ranges
from fbuf._host.columns import recompress
from fbuf._host.columns.chunked_file import FileChunks
from fbuf._host.columns.raw import Ring
from fbuf._host.columns.raw_file import FileRing
from fbuf._host.columns.spec import Column, check_patch, check_request, check_rows, check_slots, one_by_one
from fbuf._host.interfaces import Fetch, Job, Part
from fbuf._host.io.directory import Folder
from fbuf._host.memory.lazy_array import Source, expect, within
from fbuf._host.recovery import longest
from fbuf._host.store import serialize
from fbuf._host.store.factory import Making, kinds
from fbuf._host.store.read_ahead import ReadAhead, Reading, Still
from fbuf._host.store.row_updates import PATCH, Patch, Patches
from fbuf._host.store.slot_map import Move, Places
from fbuf._host.store.tickets import Tickets
from fbuf._host.store.update_log import ChangeLog
from fbuf._host.types import Array, StoreClosed, StoreCorrupted, bare, flat, intact

__all__ = ["PATCH", "Column", "Store", "StoreClosed"]

F = TypeVar("F", bound=Callable[..., Any])


def _recorded(method: F) -> F:
    """Keeps what a call raises as `last_error`: JAX turns exceptions of callbacks into text."""

    @functools.wraps(method)
    def call(self: Store, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.last_error = bare(error)
            raise

    return cast(F, call)


class Store:
    """Rows of some columns, E lanes, readable by ticket from any thread.

    Args:
      columns: The leaves, at least one.
      lanes: E.
      length: Rows a lane of the buffer holds.
      slack: Rows kept beyond that, for states a little old.
      first_seq: Count of the first row of each lane; without streams, lap of the first row of each place.
      cache: Bytes of decoded chunks kept for later reads, for each column with a codec that works by chunks.
      streams: New rows replace the oldest of their lane. False: each replaces the row in a slot that `write` is told.
      folder: Where the rows lie in files; with a store in it that is to go on, its rows. None: in memory.
    Raises:
      ValueError: no columns, lanes or length < 1, slack or first_seq < 0; without streams, a folder, or a codec of the user's
        whose chunk is not 1.
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
        cache: int = 0,
        streams: bool = True,
        folder: Folder | None = None,
    ) -> None:
        for name, value, least in (
            ("columns", len(columns), 1),
            ("lanes", lanes, 1),
            ("length", length, 1),
            ("slack", slack, 0),
            ("first_seq", first_seq, 0),
            ("cache", cache, 0),
        ):
            if value < least:
                raise ValueError(f"Store: {name} is {value}; expected {least} or more. Pass {name}={least}.")
        if folder is not None and not streams:
            raise ValueError(
                "Store: rows in files are streams; expected a writer that replaces the oldest. Use writers.Ring(), or a "
                "storage without a path."
            )
        self.columns = tuple(columns) if streams else tuple(one_by_one(c) for c in columns)
        self.lanes = lanes
        self.length = length
        self.slack = slack
        self.cache = cache
        self._places = None if streams else Places(lanes * length, lanes * slack, first_seq)
        self._lanes = lanes if streams else 1  # of the parts
        self.depth = length + slack if self._places is None else self._places.size
        self.last_error: Exception | None = None
        self._tickets = Tickets(lanes, self.depth, first_seq)
        # Rows accepted, by lane, from first_seq on; without streams, places that hold a row.
        self._count: Array = np.zeros(self._lanes, np.int64)
        self._folder = folder
        self._make = Making(self.columns, self._lanes, self.depth, cache, folder)
        self._parts: list[Part] = [self._make.part(i) for i in range(len(self.columns))]
        self._patches = Patches([c.codec for c in self.columns], slack)
        self._log: ChangeLog | None = None
        self.held: Array = np.zeros(self._lanes, np.int64)  # rows of each lane that were there when it was opened
        self.warning = ""  # what was wrong with the files then
        self._flushed = time.monotonic()
        self._ahead = ReadAhead(weakref.WeakMethod(self._finish))
        self._writing = threading.Lock()  # taken before _lock
        self._lock = threading.Lock()
        self._closed = False
        self._broken = False  # a write ended half-way
        self._repacking = threading.Lock()  # taken before _writing
        self._lots: list[Job] = []  # under way
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Folder) -> None:
        """Takes the rows that lie in a folder."""
        self._log = ChangeLog(folder)
        if folder.fresh:
            return
        count, files = folder.count, [p for p in self._parts if isinstance(p, FileRing | FileChunks)]
        low, changed = np.maximum(count - self.depth, folder.first), 0
        self._count, self.held = count.copy(), np.minimum(count - low, self.length)
        if folder.verify:
            chunks = [part.chunks.k for part in files if isinstance(part, FileChunks)]
            lost = [part.damaged(low, count) for part in files]
            self._count, self.held = longest(low, count, self.length, lost, chunks)
            if count.any() and not self.held.any():
                raise StoreCorrupted(
                    f"Buffer.resume: none of the rows at {folder.path} is what was written; expected some. Their files were "
                    f"damaged, or put together from several moments: load the last checkpoint with fbuf.load(path)."
                )
            first, before = self._count - self.held, np.maximum(count - self.length, low)
            changed = int((count - self._count + np.maximum(first - before, 0)).clip(max=count - before).sum())
            cut = (self._count < count) | (first > before)
            folder.first = np.where(cut, first, folder.first)
            low = np.maximum(self._count - self.depth, folder.first)
        for i, part in enumerate(self._parts):
            if isinstance(part, FileRing):
                part.resume(low, self._count, checked=folder.verify)
            elif isinstance(part, FileChunks | Ring):
                part.resume(self._count)
            if not isinstance(part, FileChunks):
                folder.delete_chunks(f"column{i}")
        lost_changes = self._log.load(self._patches, low, self._count, len(self.columns))
        if changed or lost_changes:
            folder.save(kinds(self._parts), self._count, self._patches.made)
            self.warning = (
                f"Buffer.resume: {changed} rows and {lost_changes} changes of rows at {folder.path} are not what was written "
                f"(a failure of power, or damaged files), and were given up: the state goes on with the longest run of whole "
                f"rows of each lane. What is needed of them is in the last checkpoint: fbuf.load(path)."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("Store: the store is closed; expected an open one. Make a new buffer with `init`.")
        if self._broken:
            raise StoreCorrupted(
                "Store: a write ended half-way (it was interrupted, or there was no memory left), and what is there is not "
                "known to be right; expected a whole one. Load the last checkpoint with fbuf.load(path)."
            )

    # ---------------------------------------------------------------- writing

    @_recorded
    def write(
        self,
        rows: Sequence[Array],
        keep: Array | None,
        slots: Array | None = None,
        state: tuple[int, Array] | None = None,
    ) -> Array:
        """Takes rows in; each gets a new ticket.

        Args:
          rows: One array a column, `[N, E, *shape]`, of the column's dtype. Not kept.
          keep: bool[N, E], or None for all.
          slots: int32[N, E], without streams: the slot, 0 to E * length - 1, whose row each one replaces. Rows with any
            other are not kept; no slot comes twice.
          state: Without streams: which state this goes on from, by the ticket of the first row that was kept in the write
            that made it (0: none was), and its tickets uint64[E * length] by slot, which are looked at if that was not the
            last write. None: it was.
        Returns:
          Tickets uint64[N, E], 0 where not kept.
        Raises:
          ValueError, TypeError: shapes or dtypes do not fit. Nothing was stored, as with any exception.
          StoreClosed: after `close`.
        Cost: about 2.5 to 4 us a frame of 84x84 with Zstd, one copy without codec; some 20 us a call.
        """
        keep = check_rows(self.columns, self.lanes, rows, keep)
        n, places = len(rows[0]), self._places
        if places is not None:
            keep = check_slots(slots, keep, (n, self.lanes), self.lanes * self.length)
        with self._writing:
            self._check_open()
            if self._folder is None:
                return self._write(rows, keep, slots, state)
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
            if self._folder.sync is not None and time.monotonic() - self._flushed >= self._folder.sync:
                self._flush()
        return np.concatenate(tickets)

    def _write(
        self,
        rows: Sequence[Array],
        keep: Array | None,
        slots: Array | None = None,
        state: tuple[int, Array] | None = None,
    ) -> Array:
        """`write`, of checked rows, all or nothing; `_writing` is held."""
        n, places = len(rows[0]), self._places
        if n == 0 or (keep is not None and not keep.any()):
            return np.zeros((n, self.lanes), np.uint64)
        move: Move | None = None
        if places is None:
            batch, tickets = self._stream(rows, keep)
            after = batch.after
        else:
            assert slots is not None
            if state is not None and state[0] != places.newest:
                places.resume(*self._resolve(0, state[1])[1:3])
                places.newest = state[0]  # also if this write fails
            move = places.plan(slots[... if keep is None else keep].reshape(-1).astype(np.int64))
            batch, tickets = self._scatter(rows, keep, move)
            after = np.minimum(batch.after, self.depth)
        parts, staged = list(self._parts), list[Any]()
        with self._undone(parts, staged):
            for i, part in enumerate(parts):
                stage = part.stage(batch, batch.rows[i])
                if stage.incompressible:
                    parts[i] = self._make.as_ring(i, part, self._count, n)
                    stage = parts[i].stage(batch, batch.rows[i])
                staged.append(stage)
            self._ahead.settle(after - self.depth, batch.at)
            if self._folder is not None:  # readers need not wait for a disk: what they see changes in memory only
                self._reserve(parts, staged)
                self._folder.save(kinds(parts), after)
        with self._lock:
            if self._folder is None:
                with self._undone(parts, staged):
                    self._reserve(parts, staged)
            self._broken = True  # an interrupt may come at any point from here on
            self._count = after
            for part, array, stage in zip(parts, batch.rows, staged, strict=True):
                part.commit(batch, array, stage)
            replaced = [i for i, part in enumerate(parts) if part is not self._parts[i]]
            self._parts = parts
            if places is None or move is None:
                self._patches.expire(after - self.depth)
            else:
                places.commit(move)
                self._patches.forget(move.gone.tolist())
            self._broken = False
            for part in parts:
                part.compact(after)
            self._repack_if_due()
        for i in replaced:
            if self._folder is not None:
                self._folder.delete_chunks(f"column{i}")
        return tickets

    def flush(self) -> None:
        """Waits until every row written so far is on the disk; nothing to do without a folder.

        Raises:
          OSError: that cannot be done.
          StoreClosed: the store is closed.
        """
        with self._writing:
            self._check_open()
            self._flush()

    def _flush(self) -> None:
        if self._folder is not None:
            self._folder.flush()
            self._flushed = time.monotonic()

    def _stream(self, rows: Sequence[Array], keep: Array | None) -> tuple[Batch, Array]:
        """Rows that follow those of their lane, and their tickets."""
        n, before = len(rows[0]), self._count
        kept = np.full(self.lanes, n, np.int64) if keep is None else keep.sum(axis=0, dtype=np.int64)
        level = keep is None and bool((before == before[0]).all())
        return Batch(rows, keep, before, before + kept, level), self._tickets.of_batch(keep, n, before)

    def _scatter(self, rows: Sequence[Array], keep: Array | None, move: Move) -> tuple[Batch, Array]:
        """Rows that go to places, and their tickets."""
        tickets = np.zeros(rows[0].shape[:2], np.uint64)
        tickets[... if keep is None else keep] = move.ticket if keep is not None else move.ticket.reshape(tickets.shape)
        chosen = [r if keep is None else r[keep] for r in rows]
        number = len(move.at)
        single = [c.reshape(number, 1, *column.shape) for c, column in zip(chosen, self.columns, strict=True)]
        batch = Batch(single, None, self._count, self._count + number, False, at=move.at, gone=move.gone)
        return batch, tickets

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
        reading = self._look_up([(column, tickets) for column, tickets, _ in requests])
        return self._finish(reading, [out for *_, out in requests])

    def _look_up(self, requests: Sequence[tuple[int, Array]]) -> Reading:
        """Where the rows lie that (column, tickets) ask for."""
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)  # rows that are there, ticket 0 is not
        fetches: list[tuple[Fetch, list[int], list[slice], Still]] = []
        patched: list[tuple[int, int, int, bytes]] = []
        with self._lock:
            self._check_open()
            for column in sorted({c for c, _ in requests}):
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
                lasting = Still(column, tickets, lane, count)
                fetches.append((part.fetch(lane, count, there, self._count, starts), group, pieces, lasting))
            return Reading(wanted, present, fetches, patched, self._patches)

    def _finish(self, reading: Reading, outs: Sequence[Array]) -> Array:
        """Fills `outs`, one a request; what `read` returns. Once for each `reading`."""
        wanted, present, fetches, patched, patches = reading
        wrong = [fetch.run([flat(outs[i]) for i in group]) for fetch, group, *_ in fetches]
        if any(fetch.volatile for fetch, *_ in fetches):
            with self._lock:  # rows overwritten while they were copied have expired by now
                last = [self._lasting(still) if fetch.volatile else None for fetch, *_, still in fetches]
            for (_, group, pieces, _), bad, stays in zip(fetches, wrong, last, strict=True):
                if stays is not None:
                    intact(bad, stays)
                    for i, piece in zip(group, pieces, strict=True):
                        present[i] &= stays[piece]
        for i, at, column, value in patched:
            if present[i][at]:
                row = self.columns[column].nbytes
                patches.decode(column, value, flat(outs[i])[at * row : (at + 1) * row])
        for out, there in zip(outs, present, strict=True):
            if not there.all() and out.nbytes:
                out.reshape(-1).view(np.uint8).reshape(len(there), -1)[~there] = 0
        oks = [there | (t == 0) for there, t in zip(present, wanted, strict=True)]
        return np.concatenate(oks) if oks else np.ones(0, bool)

    def _lasting(self, still: Still) -> Array:
        """bool[M], which rows that were there have not expired; `_lock` is held."""
        if self._places is not None:
            return self._resolve(still.column, still.tickets)[2]
        return cast(Array, still.row >= np.maximum(self._count - self.depth, 0)[still.lane])

    # ---------------------------------------------------------------- reading ahead

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Begins a read on the store's own thread, of (column, tickets uint64[...]); `collect` hands out what it gave.

        Where the rows lie is found here, so that compressed rows which expire in the meantime are read all the same.

        Returns:
          A number for `collect`, 1 to 2^32 - 1.
        Raises:
          ValueError, TypeError, StoreClosed: as for `write`.
        Cost: some 100 us; the copies of the last two requests' rows stay in memory.
        """
        return self._ahead.request(self.columns, requests, self._look_up)

    @_recorded
    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """What `read` does, out of request `number` if that is what it asked for and has not been dropped since.

        Waits if it is under way. A request that failed, was dropped or asked for something else is no error: the rows are
        read now, and that is where an error of theirs is raised.
        """
        return self._ahead.collect(self.columns, number, requests, self.read)

    def _resolve(self, column: int, tickets: Array) -> tuple[Array, Array, Array, list[tuple[int, bytes]]]:
        """Of every ticket: lane, count, whether it is there (False for 0); and the patched values among them."""
        stream = tickets
        found: list[tuple[int, bytes]] = []
        is_patch = tickets >= np.uint64(PATCH)
        if is_patch.any():
            stream = tickets.copy()
            for at in np.flatnonzero(is_patch).tolist():
                patch = self._patches.held.get(int(tickets[at]))
                stream[at] = 0 if patch is None else self._ticket_of(patch)
                if patch is not None and column in patch.values:
                    found.append((at, patch.values[column]))
        if self._places is not None:
            place, ok = self._places.find(stream)
            return np.zeros(len(place), np.int64), place, ok, found
        return *self._tickets.find(stream, self._count), found

    def newest(self) -> tuple[Array, Array]:
        """Rows of each lane, int64[E], and tickets uint64[length, E] of the newest `length` of them: row `count` at
        `count % length`, as a new state of them has it; of a row that was changed the last change. 0: none.
        """
        with self._lock:
            self._check_open()
            tickets = np.zeros((self.length, self.lanes), np.uint64)
            low = np.maximum(self._count - self.length, 0 if self._folder is None else self._folder.first)
            lane, count = ranges(low, self._count)
            tickets[count % self.length, lane] = self._tickets.of(lane, count)
            for ticket, patch in sorted(self._patches.held.items()):
                if patch.count >= low[patch.lane]:
                    tickets[patch.count % self.length, patch.lane] = ticket
            return self._count.copy(), tickets

    # ---------------------------------------------------------------- compressing again

    def _repack_if_due(self) -> None:
        """Starts the thread that compresses closed chunks again, if there is a lot and no thread; `_lock` is held."""
        if self._thread is not None and self._thread.is_alive():
            return
        if any(part.lot(self._count, None) for part in self._parts):
            try:
                self._thread = recompress.start(weakref.WeakMethod(self.repack_some))
            except RuntimeError as error:  # no more threads: it only saves memory
                self.last_error = bare(error)

    def repack(self) -> None:
        """Compresses every closed chunk again that was not yet, and returns when that is done.

        Raises:
          StoreClosed: the store is closed.
        Cost: 8 to 20 us a frame of 84x84.
        """
        while self.repack_some(least=1):
            pass

    @_recorded
    def repack_some(self, least: int | None = None) -> bool:
        """Compresses some closed chunks again; False if there is no lot of them, or of at least so many."""
        with self._repacking:
            if not self._lots:
                with self._lock:
                    self._check_open()
                    lots = [part.lot(self._count, least) for part in self._parts]
                self._lots = [lot for lot in lots if lot is not None and not lot.finished]
                if not self._lots:
                    return False
            lot = self._lots[-1]
            part = lot.part
            assert part.packer is not None
            try:
                with self._lock:
                    self._check_open()
                    found = part.look(lot, part.packer.wanted(lot))
                piece = part.packer.pack(lot, found)
                del found  # lets go of their segments
                with self._writing, self._lock:
                    self._check_open()
                    part.swap(lot, piece)
            except BaseException:
                part.leave(lot)
                self._lots.pop()
                raise
            if lot.finished:
                self._lots.pop()
            return True

    def _ticket_of(self, patch: Patch) -> int:
        """The ticket of the row that it comes from."""
        if self._places is not None:
            return int(self._places.ticket[patch.count])
        return int(self._tickets.of(np.array(patch.lane), np.array(patch.count)))

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
            if self._log is not None and self._folder is not None and made:
                with self._log.appended(self._patches.made + 1, [patch for _, patch in made]):
                    self._folder.save(kinds(self._parts), self._count, self._patches.made + len(made))
            with self._lock:
                new[picks] = np.array(self._patches.add(made), np.uint64)
            if self._log is not None:
                self._log.tidy(self._patches)
        return new

    # ---------------------------------------------------------------- checkpoints

    @_recorded
    def to_arrays(self) -> dict[str, Any]:
        """Everything as flat arrays of plain dtypes; chunks stay encoded.

        What is large is a `source.Lazy`: read when it is asked for, in any thread, it gives what is there now, whatever is
        written, compressed again or closed in the meantime. What a row was is kept for it in memory when the row goes.

        Cost: a copy of the index, some 3 bytes a row of chunks of 8, and the rows of chunks that are not full yet, compressed;
          writers wait that long (4 ms for a million frames of 8 lanes).
        """
        with self._writing:  # nothing changes without it, and readers need not wait
            self._check_open()
            arrays: dict[str, Any] = {
                "geometry": serialize.geometry(self.lanes, self.length, self.slack),
                "first": np.array([self._tickets.first], np.uint64),
                "count": self._count.copy(),
            }
            for i, part in enumerate(self._parts):
                arrays |= {f"column{i}:{n}": a for n, a in serialize.save(part, self._count).items()}
            if self._places is not None:
                arrays |= self._places.to_arrays()
            return arrays | serialize.save_patches(self._patches)

    @classmethod
    def from_arrays(
        cls,
        columns: tuple[Column, ...],
        arrays: Mapping[str, Source],
        *,
        lanes: int,
        length: int,
        slack: int,
        cache: int = 0,
        streams: bool = True,
        folder: Folder | None = None,
    ) -> Store:
        """The store `to_arrays` was called on: the same tickets readable, writes go on.

        Raises:
          ValueError: the arrays are of another format or geometry, or do not fit together.
          StoreCorrupted: a dictionary is damaged. Damaged chunks are found when they are read.
        """
        first = serialize.check_geometry(arrays, lanes, length, slack, streams)
        store = cls(
            columns,
            lanes=lanes,
            length=length,
            slack=slack,
            first_seq=first,
            cache=cache,
            streams=streams,
            folder=folder,
        )
        store._count = expect(arrays, "count", np.int64, (store._lanes,)).copy()
        if (store._count < 0).any():
            raise ValueError("Store.from_arrays: count is negative; expected 0 or more. Load another checkpoint.")
        if not streams:
            store._places = Places.from_arrays(arrays, lanes * length, lanes * slack)
            if store._count.tolist() != [store._places.touched]:
                raise ValueError(
                    f"Store.from_arrays: count is {store._count.tolist()}; expected {[store._places.touched]}, as many as "
                    f"there are tickets. Load another checkpoint."
                )
        for i in range(len(store.columns)):
            own = within(arrays, f"column{i}:")
            store._parts[i] = store._make.saved(i, store._parts[i], own)
            serialize.load(store._parts[i], own, store._count)
        low = np.maximum(store._count - store.depth, 0)
        serialize.load_patches(store._patches, arrays, low, store._count, len(store.columns))
        if folder is not None and store._log is not None:
            store._log.write(store._patches)
            folder.save(kinds(store._parts), store._count, store._patches.made)
        return store

    # ---------------------------------------------------------------- size, end

    @property
    def nbytes(self) -> int:
        """Bytes held: segments (whole), index, dictionaries, contexts, open chunks, rings (as far as
        written), changes, rows read ahead.

        Decompressors live for one `read` only and are not counted (96 KB each).
        """
        with self._lock:
            self._check_open()
            return self._nbytes()

    def _nbytes(self) -> int:
        total = self._count.nbytes + self._patches.nbytes + self._ahead.nbytes
        total += 0 if self._places is None else self._places.nbytes
        for part in self._parts:
            total += part.size(self._count)
        return total

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Bytes in memory and on the disk by column; what columns share is not among them."""
        with self._lock:
            self._check_open()
            memory = [part.size(self._count) for part in self._parts]
        disk = [0 if self._folder is None else self._folder.size(f"column{i}.") for i in range(len(memory))]
        return {c.name: size for c, size in zip(self.columns, zip(memory, disk, strict=True), strict=True)}

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
                "rows_accepted": int(self._count.sum()) if self._places is None else self._places.accepted,
                "rows_live": live,
                "chunks": chunks,
                "payload_bytes": payload,
                "raw_bytes": live * sum(c.nbytes for c in self.columns),
                "dictionaries": dictionaries,
                "patches": len(self._patches.held),
                "nbytes": self._nbytes(),
            }

    def close(self) -> None:
        """Frees the rows; reads under way finish, later calls raise StoreClosed. Closing twice is fine."""
        self._ahead.close()
        with self._repacking, self._writing, self._lock:
            self._closed = True
            self._parts = []
            self._lots = []
            self._patches = Patches([c.codec for c in self.columns], self.slack)
            self._log = None
            if self._folder is not None:
                self._folder.close()
