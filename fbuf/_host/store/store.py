"""Store rows behind tickets: numpy in and numpy out, for the callbacks of jitted code.

Each row gets a ticket that is never used again, so two futures of one buffer state cannot read each other's rows. The newest
`length + slack` rows of a lane can be read; older ones have expired. A stream ticket is `count * E + lane + 1`; an updated
row (`update_rows`) has a ticket with bit 63 set and holds the updated columns only, until the row it replaced expires. Where a
writer replaces any row, rows have places (`slot_map`), which to the columns are the counts of a single lane.

Locks, in the order they are taken: `_repacking` (recompression), `_writing` (held while a batch is encoded), `_lock`
(bookkeeping, a fraction of a millisecond). Decoding holds none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fbuf._host.columns import recompress
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.columns.spec import Column, one_by_one
from fbuf._host.io.directory import Folder
from fbuf._host.memory.lazy_array import Sources, expect, within
from fbuf._host.store import serialize
from fbuf._host.store.factory import ColumnFactory, kind_bytes, reopen
from fbuf._host.store.read_ahead import PendingRows
from fbuf._host.store.reads import Found, TicketReads
from fbuf._host.store.row_updates import CUT, UPDATE_BIT, RowUpdate, RowUpdates, UpdateLog
from fbuf._host.store.slot_map import Placement, SlotMap
from fbuf._host.types import (
    LOST,
    Array,
    Batch,
    ColumnData,
    StoreClosed,
    StoreCorrupted,
    Tickets,
    ranges,
    records_errors,
    unfit,
    without_traceback,
)

__all__ = ["UPDATE_BIT", "Column", "Store", "StoreClosed"]

SlotState = tuple[int, Array]


class Store(TicketReads):
    """Rows of some columns, E lanes, readable by ticket from any thread.

    Args:
      columns: The leaves, at least one.
      lanes: E.
      length: Rows a lane of the buffer holds.
      slack: Rows kept beyond that, for slightly old states.
      first_seq: Count of the first row of each lane; without streams, lap of the first row of each place.
      cache: Bytes of decoded chunks kept for later reads, for each column with a codec that works by chunks.
      streams: New rows replace the oldest of their lane. False: each replaces the row in a slot that `write` is told.
      folder: The directory of rows in files, new or of a store to resume. None: in memory.
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
        super().__init__()
        self.columns = tuple(columns) if streams else tuple(one_by_one(c) for c in columns)
        self.lanes = lanes
        self.length = length
        self.slack = slack
        self.cache = cache
        self._slots = None if streams else SlotMap(lanes * length, lanes * slack, first_seq)
        self._lanes = lanes if streams else 1  # of the parts
        self.depth = length + slack if self._slots is None else self._slots.size
        self._tickets = Tickets(lanes, self.depth, first_seq)
        # Rows accepted, by lane, from first_seq on; without streams, places that hold a row.
        self._count: Array = np.zeros(self._lanes, np.int64)
        self._folder = folder
        self._path = None if folder is None else folder.path
        self._make = ColumnFactory(self.columns, self._lanes, self.depth, cache, folder)
        self._parts: list[ColumnData] = [self._make.part(i) for i in range(len(self.columns))]
        self._updates = RowUpdates([c.codec for c in self.columns], slack)
        self._log: UpdateLog | None = None
        self.resumed: Array = np.zeros(self._lanes, np.int64)  # rows of each lane that were there when it was opened
        self.warning = ""  # what was wrong with the files then
        # Lanes of files with a cut after the newest row that is not recorded.
        self._uncut: Array = np.zeros(lanes, bool)
        self._flushed = time.monotonic()
        self._writing = threading.Lock()  # taken before _lock
        self._closed = False
        self._broken = False  # a write ended half-way
        self._repacking = threading.Lock()  # taken before _writing
        self._jobs: list[recompress.RecompressJob] = []  # under way
        self._thread: threading.Thread | None = None
        if folder is not None:
            self._log = UpdateLog(folder)
            if not folder.fresh:
                state = reopen(folder, self._parts, self._updates, self._log, self.depth, length)
                self._count, self.resumed, self.warning = state

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("Store: the store is closed; expected an open one. Make a new buffer with `init`.")
        if self._broken:
            raise StoreCorrupted(
                "Store: a write was interrupted or ran out of memory, and the store may be inconsistent; expected a complete "
                "write. Load the last checkpoint with fbuf.load(path)."
            )

    # ---------------------------------------------------------------- writing

    @records_errors
    def write(
        self, rows: Sequence[Array], keep: Array | None, slots: Array | None = None, state: SlotState | None = None
    ) -> Array:
        """Store rows; each gets a new ticket.

        Args:
          rows: One array a column, `[N, E, *shape]`, of the column's dtype (unchecked). Not kept.
          keep: bool[N, E], or None for all.
          slots: int32[N, E], without streams: the slot, 0 to E * length - 1, whose row each one replaces. Rows with any
            other are not kept; no slot comes twice.
          state: Without streams: the state that this write continues, by the ticket of the first row kept in the write that
            made it (0: none), and its tickets uint64[E * length] by slot, read if that was not the last write. None: it was.
        Returns:
          Tickets uint64[N, E], 0 where not kept.
        Raises:
          StoreClosed: after `close`. Nothing was stored, as with any exception but that of files that took some first rows.
        Cost: about 2.5 to 4 us a frame of 84x84 with Zstd, one copy without codec; about 20 us a call.
        """
        tickets = np.zeros(rows[0].shape[:2], np.uint64)
        self._write_all(tickets, rows, keep, slots, state)
        return tickets

    @records_errors
    def try_write(
        self, rows: Sequence[Array], keep: Array | None, slots: Array | None = None, state: SlotState | None = None
    ) -> tuple[Array, Exception | None]:
        """Store what can be stored: rows of the first steps if a large write fails half-way.

        Returns:
          Tickets as of `write`, 0 for rows that are not stored; and the error, if there was one.
        """
        tickets = np.zeros(rows[0].shape[:2], np.uint64)
        try:
            self._write_all(tickets, rows, keep, slots, state)
        except (OSError, MemoryError, StoreCorrupted) as error:
            if self._log is not None:
                lost = tickets == 0 if keep is None else keep & (tickets == 0)
                self._uncut |= lost.any(axis=0)
            return tickets, without_traceback(error)
        return tickets, None

    def _write_all(
        self,
        tickets: Array,
        rows: Sequence[Array],
        keep: Array | None,
        slots: Array | None = None,
        state: SlotState | None = None,
    ) -> None:
        """Store rows in as many parts as files need; fill in the tickets of what is stored."""
        n = len(tickets)
        if slots is not None:
            inside = (slots >= 0) & (slots < self.lanes * self.length)
            keep = inside if keep is None else inside & keep
        if keep is not None and keep.all():
            keep = None
        with self._writing:
            self._check_open()
            if self._folder is None:
                tickets[...] = self._write(rows, keep, slots, state)
                return
            self._folder.check_held()
            if self._uncut.any():
                self._record_cuts()
            done = 0
            while done < n:
                # In files, rows are written before they count, to places without readable rows.
                room = min((p.room(self._count) for p in self._parts if isinstance(p, RawFileColumn)), default=n)
                part = slice(done, min(done + room, n))
                try:
                    tickets[part] = self._write([r[part] for r in rows], None if keep is None else keep[part])
                except OSError as error:
                    if done:
                        error.strerror = f"{error.strerror} The first {done} of {n} rows were written before."
                    raise
                done = part.stop
            if self._folder.sync is not None and time.monotonic() - self._flushed >= self._folder.sync:
                self._flush()

    def _write(
        self, rows: Sequence[Array], keep: Array | None, slots: Array | None = None, state: SlotState | None = None
    ) -> Array:
        """Store checked rows, all or none; `_writing` is held."""
        n, places = len(rows[0]), self._slots
        if n == 0 or (keep is not None and not keep.any()):
            return np.zeros((n, self.lanes), np.uint64)
        placement: Placement | None = None
        if places is None:
            batch, tickets = self._stream(rows, keep)
            after = batch.after
        else:
            assert slots is not None
            if state is not None and state[0] != places.newest:
                places.resume(*self._resolve(state[1])[1:3])
                places.newest = state[0]  # also if this write fails
            placement = places.plan(slots[... if keep is None else keep].reshape(-1).astype(np.int64))
            batch, tickets = self._scatter(rows, keep, placement)
            after = np.minimum(batch.after, self.depth)
        parts, staged = list(self._parts), list[Any]()
        with self._undone(parts, staged):
            for i, part in enumerate(parts):
                stage = part.stage(batch, batch.rows[i])
                if stage is not None and stage.incompressible:
                    parts[i] = self._make.as_ring(i, part, self._count, n)
                    stage = parts[i].stage(batch, batch.rows[i])
                staged.append(stage)
            self._ahead.finish_before_overwrite(after - self.depth, batch.at)
            if self._folder is not None:  # readers need not wait for the disk: what they see changes in memory only
                self._reserve(parts, staged)
                self._folder.save(kind_bytes(parts), after)
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
            if places is None or placement is None:
                self._updates.expire(after - self.depth)
            else:
                places.commit(placement)
                self._updates.forget(placement.evicted.tolist())
            self._broken = False
            for part in parts:
                part.compact(after)
            self._repack_if_due()
        for i in replaced:
            if self._folder is not None:
                with contextlib.suppress(OSError):  # the rows were written; a resume removes the files
                    self._folder.retire_chunks(f"column{i}")
        return tickets

    def flush(self) -> None:
        """Wait until every row written so far is on disk; without a folder, do nothing.

        Raises:
          OSError: that cannot be done.
          StoreClosed: the store is closed.
        """
        with self._writing:
            self._check_open()
            self._flush()

    def _flush(self) -> None:
        if self._folder is not None:
            self._folder.check_held()
            self._folder.flush()
            self._flushed = time.monotonic()

    def _stream(self, rows: Sequence[Array], keep: Array | None) -> tuple[Batch, Array]:
        """Return rows that follow those of their lane as a batch, and their tickets."""
        n, before = len(rows[0]), self._count
        kept = np.full(self.lanes, n, np.int64) if keep is None else keep.sum(axis=0, dtype=np.int64)
        level = keep is None and bool((before == before[0]).all())
        return Batch(rows, keep, before, before + kept, level), self._tickets.of_batch(keep, n, before)

    def _scatter(self, rows: Sequence[Array], keep: Array | None, placement: Placement) -> tuple[Batch, Array]:
        """Return rows that go to places as a batch, and their tickets."""
        tickets = np.zeros(rows[0].shape[:2], np.uint64)
        tickets[... if keep is None else keep] = (
            placement.ticket if keep is not None else placement.ticket.reshape(tickets.shape)
        )
        chosen = [r if keep is None else r[keep] for r in rows]
        number = len(placement.at)
        single = [c.reshape(number, 1, *column.shape) for c, column in zip(chosen, self.columns, strict=True)]
        batch = Batch(
            single, None, self._count, self._count + number, False, at=placement.at, evicted=placement.evicted
        )
        return batch, tickets

    @staticmethod
    def _reserve(parts: list[ColumnData], staged: list[Any]) -> None:
        for part, stage in zip(parts, staged, strict=True):
            part.reserve(stage)

    @staticmethod
    @contextlib.contextmanager
    def _undone(parts: list[ColumnData], staged: list[Any]) -> Iterator[None]:
        """Cancel what was staged if the `with` block fails."""
        try:
            yield
        except BaseException:
            for part, stage in zip(parts, staged, strict=False):
                part.cancel(stage)
            raise

    # ---------------------------------------------------------------- reading

    def _find_rows(self, columns: Sequence[int], tickets: Array, starts: Array) -> list[Found]:
        self._check_open()
        lane, count, present, updates = self._resolve(tickets)
        found, rows = list[Found](), PendingRows(tickets, lane, count)
        for column in columns:
            updated, fetched = list[tuple[int, Callable[[memoryview], None]]](), present
            for at, update in updates:
                if column in update.values:
                    updated.append((at, functools.partial(self._updates.decode, column, update.values[column])))
            if updated:
                fetched = present.copy()
                fetched[[at for at, _ in updated]] = False
            fetch = self._parts[column].fetch(lane, count, fetched, self._count, starts)
            found.append((fetch, present, updated, rows))
        return found

    def _are_readable(self, rows: PendingRows) -> Array:
        if self._slots is not None:
            return self._resolve(rows.tickets)[2]
        return np.asarray(rows.row >= np.maximum(self._count - self.depth, 0)[rows.lane])

    def _resolve(self, tickets: Array) -> tuple[Array, Array, Array, list[tuple[int, RowUpdate]]]:
        """Return lane, count, whether it is there (False for 0) of each ticket, and the updated rows among them."""
        stream = tickets
        found: list[tuple[int, RowUpdate]] = []
        is_updated = tickets >= np.uint64(UPDATE_BIT)
        if is_updated.any():
            stream = tickets.copy()
            for at in np.flatnonzero(is_updated).tolist():
                update = self._updates.live.get(int(tickets[at]))
                stream[at] = 0 if update is None else self._ticket_of(update)
                if update is not None:
                    found.append((at, update))
        if self._slots is not None:
            place, ok = self._slots.find(stream)
            return np.zeros(len(place), np.int64), place, ok, found
        return *self._tickets.find(stream, self._count), found

    def newest(self) -> tuple[Array, Array, Array]:
        """Return the rows of each lane, int64[E]; tickets uint64[length, E] of the newest `length`: row `count` at
        `count % length`, the last update of an updated row, 0 for none; and bool[length, E], after which of them is a cut.
        """
        with self._lock:
            self._check_open()
            tickets, cuts = np.zeros((self.length, self.lanes), np.uint64), np.zeros((self.length, self.lanes), bool)
            low = np.maximum(self._count - self.length, 0 if self._folder is None else self._folder.first)
            lane, count = ranges(low, self._count)
            tickets[count % self.length, lane] = self._tickets.of(lane, count)
            for ticket, update in sorted(self._updates.live.items()):
                if update.count >= low[update.lane]:
                    tickets[update.count % self.length, update.lane] = ticket
                    cuts[update.count % self.length, update.lane] = CUT in update.values
            return self._count.copy(), tickets, cuts

    # ---------------------------------------------------------------- compressing again

    def _repack_if_due(self) -> None:
        """Start the recompression thread if there is a job and no thread; `_lock` is held."""
        if self._thread is not None and self._thread.is_alive():
            return
        if any(part.next_job(self._count, None) for part in self._parts):
            try:
                self._thread = recompress.start(weakref.WeakMethod(self.repack_some))
            except RuntimeError as error:  # no more threads: it only saves memory
                self.last_error = without_traceback(error)

    def repack(self) -> None:
        """Recompress every closed chunk that was not yet, and wait for it.

        Raises:
          StoreClosed: the store is closed.
        Cost: 8 to 20 us a frame of 84x84.
        """
        while self.repack_some(least=1):
            pass

    @records_errors
    def repack_some(self, least: int | None = None) -> bool:
        """Recompress some closed chunks; return False if there is no job of at least `least` chunks."""
        with self._repacking:
            if not self._jobs:
                with self._lock:
                    self._check_open()
                    jobs = [part.next_job(self._count, least) for part in self._parts]
                self._jobs = [job for job in jobs if job is not None and not job.finished]
                if not self._jobs:
                    return False
            job = self._jobs[-1]
            part = job.part
            assert part.packer is not None
            try:
                with self._lock:
                    self._check_open()
                    found = part.read_job(job, part.packer.wanted(job))
                packed = part.packer.pack(job, found)
                del found  # lets go of their segments
                with self._writing, self._lock:
                    self._check_open()
                    part.replace_chunks(job, packed)
            except BaseException:
                part.abandon(job)
                self._jobs.pop()
                raise
            if job.finished:
                self._jobs.pop()
            return True

    def _ticket_of(self, update: RowUpdate) -> int:
        """Return the ticket of the row that an update replaces."""
        if self._slots is not None:
            return int(self._slots.ticket[update.count])
        return int(self._tickets.of(np.array(update.lane), np.array(update.count)))

    # ---------------------------------------------------------------- changed rows

    @records_errors
    def update_rows(self, tickets: Array, keep: Array, fields: Mapping[int, Array]) -> Array:
        """Store rows again with some columns replaced; the old tickets stay readable.

        Args:
          tickets: uint64[B].
          keep: bool[B].
          fields: By column, `[B, *shape]`. Empty: record that a cut follows these rows.
        Returns:
          New tickets uint64[B]; the old one where `keep` is False, for ticket 0 and for expired rows.
        Raises:
          ValueError, TypeError, StoreClosed: as for `write`.
        Cost: one Python object and one small frame a row: for corrections, not for streams.
        """
        new, error = self.try_update_rows(tickets, keep, fields)
        if error is not None:
            raise error
        return new

    @records_errors
    def try_update_rows(
        self, tickets: Array, keep: Array, fields: Mapping[int, Array]
    ) -> tuple[Array, Exception | None]:
        """Do what `update_rows` does; also return the error of the disk or of memory, with `LOST` as tickets of unchanged rows.

        A cut after the newest row of a lane that cannot be recorded is no error: the next write records it.
        """
        new = tickets.copy()
        with self._writing:
            self._check_open()
            lane, count, present, _ = self._resolve(tickets)  # only writers drop rows, and `_writing` is held
            picks = np.flatnonzero(present & keep)
            lane, count = lane[picks], count[picks]
            rows = zip(picks.tolist(), tickets[picks].tolist(), lane.tolist(), count.tolist(), strict=True)
            try:
                prepare = self._updates.prepare
                made = [(old, prepare(old, e, n, {c: v[i] for c, v in fields.items()})) for i, old, e, n in rows]
                new[picks] = self._add_updates(made)
            except (OSError, MemoryError) as error:
                if fields or (count != self._count[lane] - 1).any():
                    new[picks] = LOST
                    return new, without_traceback(error)
                self._uncut[lane] = True
        return new, None

    def _add_updates(self, made: list[tuple[int, RowUpdate]]) -> Array:
        """Store prepared updates, each with the ticket it replaces; return their tickets. `_writing` is held."""
        if self._log is not None and self._folder is not None and made:
            self._folder.check_held()
            with self._log.appended(self._updates.made + 1, [update for _, update in made]):
                self._folder.save(kind_bytes(self._parts), self._count, self._updates.made + len(made))
        with self._lock:
            tickets = np.array(self._updates.add(made), np.uint64)
        if self._log is not None:
            self._log.tidy(self._updates)
        return tickets

    def _record_cuts(self) -> None:
        """Record that a cut follows the newest row of the lanes that lost rows; `_writing` is held."""
        made = []
        for lane in np.flatnonzero(self._uncut & (self._count > 0)).tolist():
            count = int(self._count[lane]) - 1
            newest = self._updates.newest(lane, count)
            made.append((0, self._updates.prepare(newest, lane, count, {})))  # the states' ticket stays readable
        self._add_updates(made)
        self._uncut[:] = False

    # ---------------------------------------------------------------- checkpoints

    @records_errors
    def to_arrays(self) -> dict[str, Any]:
        """Return everything as flat arrays of plain dtypes; chunks stay encoded.

        Large arrays are `Lazy`: read later, in any thread, they give what is there now, despite later writes, recompression and
        `close`. Rows that are overwritten meanwhile are kept in memory for them.

        Cost: a copy of the index, about 3 bytes a row of chunks of 8, and the rows of chunks that are not full yet, compressed;
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
            if self._slots is not None:
                arrays |= self._slots.to_arrays()
            return arrays | serialize.save_updates(self._updates)

    @classmethod
    def from_arrays(
        cls, columns: tuple[Column, ...], arrays: Sources, *, lanes: int, length: int, slack: int, **settings: Any
    ) -> Store:
        """Return the store on which `to_arrays` was called: the same tickets are readable, and writes continue.

        Args:
          settings: `cache`, `streams` and `folder`.
        Raises:
          ValueError: the arrays are of another format or geometry, or do not fit together.
          StoreCorrupted: a dictionary is damaged. Damaged chunks are found when they are read.
        """
        streams = settings.get("streams", True)
        first = serialize.check_geometry(arrays, lanes, length, slack, streams)
        store = cls(columns, lanes=lanes, length=length, slack=slack, first_seq=first, **settings)
        store._count = expect(arrays, "count", np.int64, (store._lanes,)).copy()
        serialize.check_counts(store._count, lanes)
        if not streams:
            store._slots = SlotMap.from_arrays(arrays, lanes * length, lanes * slack)
            if store._count.tolist() != [store._slots.used]:
                raise unfit(f"count is {store._count.tolist()}", f"{[store._slots.used]}, as many as there are tickets")
        for i in range(len(store.columns)):
            saved = within(arrays, f"column{i}:")
            store._parts[i] = store._make.saved(i, store._parts[i], saved)
            serialize.load(store._parts[i], saved, store._count)
        low = np.maximum(store._count - store.depth, 0)
        serialize.load_updates(store._updates, arrays, low, store._count, len(store.columns))
        if store._folder is not None and store._log is not None:
            store._log.write(store._updates)
            store._folder.save(kind_bytes(store._parts), store._count, store._updates.made)
        return store

    # ---------------------------------------------------------------- size, end

    @property
    def nbytes(self) -> int:
        """Return the bytes of segments (whole), index, dictionaries, contexts, open chunks, raw rows written, updates, and rows
        read ahead.

        What lives for one call only is not counted: decompressors (96 KB each), and the compressor of a small column (half a
        megabyte, of which zstd touches a fifth).
        """
        with self._lock:
            self._check_open()
            return self._nbytes()

    def _nbytes(self) -> int:
        total = self._count.nbytes + self._updates.nbytes + self._ahead.nbytes
        total += 0 if self._slots is None else self._slots.nbytes
        for part in self._parts:
            total += part.size(self._count)
        return total

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return bytes in memory and on disk by column, without what columns share."""
        with self._lock:
            self._check_open()
            memory = [part.size(self._count) for part in self._parts]
        disk = [0 if self._folder is None else self._folder.size(f"column{i}.") for i in range(len(memory))]
        return {c.name: size for c, size in zip(self.columns, zip(memory, disk, strict=True), strict=True)}

    @property
    def disk(self) -> int:
        """Return the bytes of files, by allocated blocks; 0 without a folder."""
        self._check_open()
        return 0 if self._folder is None else self._folder.nbytes

    @records_errors
    def stats(self) -> dict[str, int]:
        """Count rows accepted and live, chunks and their payload, raw bytes of live rows, dictionaries, updates, nbytes."""
        with self._lock:
            self._check_open()
            live = int(np.minimum(self._count, self.depth).sum())
            chunks, payload, dictionaries = map(
                sum, zip(*(p.column_stats(self._count) for p in self._parts), strict=True)
            )
            return {
                "rows_accepted": int(self._count.sum()) if self._slots is None else self._slots.accepted,
                "rows_live": live,
                "chunks": chunks,
                "payload_bytes": payload,
                "raw_bytes": live * sum(c.nbytes for c in self.columns),
                "dictionaries": dictionaries,
                "row_updates": len(self._updates.live),
                "nbytes": self._nbytes(),
            }

    def close(self) -> None:
        """Free the rows; running reads finish, later calls raise StoreClosed. Closing twice is fine."""
        self._ahead.close()
        with self._repacking, self._writing, self._lock:
            self._closed = True
            self._parts = []
            self._jobs = []
            self._updates = RowUpdates([c.codec for c in self.columns], self.slack)
            self._log = None
            if self._folder is not None:
                self._folder.close()
