"""Read rows by ticket, now or ahead: the base class of `Store` and of the read-only store of a data set.

A read finds its rows under the lock of the store (`_look_up`) and copies or decodes them without it (`_run`).

Rows are decoded ahead of `sample` in the thread `fbuf-read-ahead`. A request is only a hint: `take` returns its rows if it
asked for these tickets and succeeded; otherwise the store reads as if there had been no request. A request that no thread has
begun is run by the caller of `take`. Rows of a raw column are read before the write that may overwrite them. The thread knows
its queue only, and a request its store weakly, so neither keeps a store alive. The thread ends with the store or the
interpreter; after a fork the child starts its own.
"""

from __future__ import annotations

import abc
import atexit
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from fbuf._host.columns.spec import Column
from fbuf._host.types import Array, Fetch, StoreCorrupted, flat, raise_if_corrupted, records_errors


class PendingRows(NamedTuple):
    """The rows of a fetch, to check later whether they are still readable."""

    tickets: Array
    lane: Array
    row: Array  # count in the lane, or place


class Reading(NamedTuple):
    """A read whose rows are located; keeps alive what it reads."""

    wanted: list[Array]  # uint64[M], tickets of each request
    present: list[Array]  # bool[M], which of these rows are there
    fetches: list[tuple[Fetch, list[int], list[slice], PendingRows]]  # with its requests, their rows, and what they are
    updated: list[tuple[int, int, int, Callable[[memoryview], None]]]  # request, place in it, bytes, what writes it

    def at_risk(self, low: Array, at: Array | None) -> bool:
        """Return whether it reads places that are reused once each lane's rows before int64[E] `low` have expired.

        Where rows are in any order: once the rows of places `at` have.
        """
        for fetch, group, _, still in self.fetches:
            if fetch.may_be_overwritten:
                present = np.concatenate([self.present[i] for i in group])
                gone = still.row < low[still.lane] if at is None else np.isin(still.row, at)
                if (present & gone).any():
                    return True
        return False


Finish = Callable[[Reading, Sequence[Array]], Array]
Room = Sequence[tuple[tuple[int, ...], np.dtype[Any]]]
_KEPT = 2
"""Requests held: the one that is wanted next, and the one before it, whose arrays the next request will use."""
_PATIENCE = 0.5  # seconds between looks at whether this is another process by now


@dataclass(eq=False, slots=True)
class Request:
    """One read: waiting, running (a thread has the `claim`), or done."""

    finish: weakref.WeakMethod[Finish]
    reading: Reading | None  # None: it has been read, or never will be
    asked: Sequence[tuple[int, Array]]  # (column, tickets)
    room: Room
    outs: list[Array] | None  # arrays to fill; None: not yet made
    ok: Array | None = None  # what `Store.read` returns, once `outs` are filled well
    claim: threading.Lock = field(default_factory=threading.Lock)  # who reads has it, for good: a reading runs once
    process: int = 0  # of who has it
    done: threading.Event = field(default_factory=threading.Event)
    takers: int = 0
    collected: bool = False

    def asks(self, requests: Sequence[tuple[int, Array, Array]]) -> bool:
        """Return whether these are the rows it reads."""
        return len(requests) == len(self.asked) and all(
            a == column and np.array_equal(t, tickets)
            for (a, t), (column, tickets, _) in zip(self.asked, requests, strict=True)
        )

    def begin(self) -> bool:
        """Return whether the caller must read; True once."""
        if not self.claim.acquire(blocking=False):
            return False
        self.process = os.getpid()
        return True

    def run(self) -> Array | None:
        """Fill `outs`; return None on any error, since the error would keep alive what its frames refer to."""
        finish, reading = self.finish(), self.reading
        if finish is None or reading is None:
            return None
        try:
            if self.outs is None:
                self.outs = [np.empty(shape, dtype) for shape, dtype in self.room]
            return finish(reading, self.outs)
        except Exception:
            return None
        finally:
            self.reading = None

    def work(self) -> None:
        """Read, unless another thread has begun."""
        if self.begin():
            try:
                self.ok = self.run()
            finally:
                self.done.set()

    def wait(self) -> bool:
        """Wait for the reading thread; return False if that thread is in the process from which this one was forked."""
        while not self.done.wait(_PATIENCE):
            if self.process not in (0, os.getpid()):
                return False
        return True

    def drop(self) -> list[Array] | None:
        """Return its arrays if they are unused; it will not be started any more."""
        if self.begin():
            self.reading = None
            self.done.set()
        return self.outs if self.done.is_set() and not self.takers else None


class ReadAhead:
    """The requests of one store. Thread-safe.

    Args:
      finish: Does a reading, see `TicketReads._run`; weakly, so that no request keeps its store alive.
    """

    def __init__(self, finish: weakref.WeakMethod[Finish]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}  # by number, oldest first
        self._number = 0
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Request | None] = SimpleQueue()
        self._closed = False

    def begin(self, reading: Reading, asked: Sequence[tuple[int, Array]], room: Room) -> int:
        """Queue a read; return its number, from 1."""
        with self._lock:
            if self._closed:
                return 0
            outs = None
            if len(self._requests) >= _KEPT:
                old = next((n for n, r in self._requests.items() if r.collected), next(iter(self._requests)))
                dropped = self._requests.pop(old)
                outs = dropped.drop()
                if dropped.room != room:
                    outs = None
            self._number = self._number % (2**32 - 1) + 1
            request = self._requests[self._number] = Request(self._finish, reading, asked, room, outs)
            if self._runs():
                self._queue.put(request)
            return self._number

    def _runs(self) -> bool:
        """Return whether there is a thread; start one if there is none (a fork has neither thread nor queue)."""
        if self._thread is not None and self._thread.is_alive():
            return True
        queue: SimpleQueue[Request | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(queue,), name="fbuf-read-ahead", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this process: `take` does it all
            return False
        _threads[thread] = queue
        self._thread, self._queue = thread, queue
        weakref.finalize(self, queue.put, None).atexit = False  # `put` may be called by the garbage collector
        return True

    def take(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array | None:
        """Fill the outputs of (column, tickets, out) from request `number`.

        Returns:
          What `Store.read` returns; None: there is no such request, or it failed.
        """
        with self._lock:
            request = self._requests.get(number)
            if request is None or not request.asks(requests):
                return None
            request.takers += 1
        try:
            request.work()  # its arrays are filled all the same: it may be asked for again, when the rows are gone
            if not request.wait() or request.ok is None or request.outs is None:
                return None
            for (*_, out), done in zip(requests, request.outs, strict=True):
                out[...] = done
            return request.ok.copy()
        finally:
            with self._lock:
                request.takers -= 1
                request.collected = True

    def finish_before_overwrite(self, low: Array, at: Array | None = None) -> None:
        """Finish requests that read from places the caller is about to overwrite; see `Reading.at_risk`."""
        with self._lock:
            requests = list(self._requests.values())
        for request in requests:
            reading = request.reading
            if reading is not None and reading.at_risk(low, at):
                request.work()
                request.wait()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows held."""
        with self._lock:
            return sum(out.nbytes for request in self._requests.values() for out in request.outs or ())

    def close(self) -> None:
        """End the thread and drop all requests. Closing twice is fine."""
        with self._lock:
            self._closed = True
            self._requests.clear()
            self._queue.put(None)


_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Request | None]] = weakref.WeakKeyDictionary()


def _serve(queue: SimpleQueue[Request | None]) -> None:
    """Run requests until None is queued."""
    while (request := queue.get()) is not None:
        request.work()
        del request  # it holds arrays


@atexit.register
def _end() -> None:
    """End the threads before the interpreter exits."""
    for queue in list(_threads.values()):
        queue.put(None)
    for thread in list(_threads):
        thread.join(timeout=5.0)


Found = tuple[Fetch, Array, list[tuple[int, Callable[[memoryview], None]]], PendingRows]
"""How to fetch rows, bool[M] of which are there, what writes the updated ones of those, and what tells whether they last."""
_MOST_KEPT = (1 << 25) - (1 << 16)  # bytes; freeing more than 32 MiB does not raise glibc's threshold


@functools.cache
def _keep_freed(bits: int) -> None:
    """Let glibc keep freed batches of less than `2**bits` bytes, by freeing an array of that size once.

    Otherwise glibc may return a large batch to the system, which clears every page of the next batch: that takes longer than
    the read. The threshold that this raises is one of the whole process.
    """
    np.empty(min(1 << bits, _MOST_KEPT), np.uint8)


class TicketReads(abc.ABC):
    """Reads of rows by ticket; a store says where they are (`_find_rows`)."""

    columns: tuple[Column, ...]
    _path: str | None = None  # of the store's folder, for errors

    def __init__(self) -> None:
        self.last_error: Exception | None = None
        self._lock = threading.Lock()
        self._ahead = ReadAhead(weakref.WeakMethod(self._run))

    @abc.abstractmethod
    def _find_rows(self, columns: Sequence[int], tickets: Array, starts: Array) -> list[Found]:
        """Find rows of each column by tickets uint64[M], of requests that begin at int64[R] `starts`; `_lock` is held.

        Raise StoreClosed or StoreCorrupted if rows cannot be read.
        """

    def _are_readable(self, rows: PendingRows) -> Array:
        """Return bool[M], which rows have not expired since they were found: by default all. `_lock` is held."""
        return np.ones(len(rows.tickets), bool)

    @records_errors
    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fetch rows by ticket. A chunk that several requests of a column need is decoded once.

        Args:
          requests: (column, tickets uint64[...], out `[..., *shape]`). `out` is C-contiguous and writeable, and every byte
            of it is written. Ticket 0 and tickets of expired or unknown rows give zeros.
        Returns:
          bool[M], one request after another: False where the row expired or never was; True for ticket 0.
        Raises:
          StoreCorrupted: Stored bytes are damaged; `out` is then undefined.
          ValueError, TypeError, StoreClosed: As for `write`.
        Cost: 3 ms for 256 pairs of 4-stacks of 84x84 with Zstd, half of it in zstd; about 100 us a call.
        """
        reading = self._look_up([(column, tickets) for column, tickets, _ in requests])
        return self._run(reading, [out for *_, out in requests])

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Start a read of (column, tickets uint64[...]) on the store's own thread; `collect` returns its rows.

        The rows are located now, so that compressed rows that expire before `collect` are still read.

        Returns:
          A number for `collect`, 1 to 2^32 - 1; 0 if no read was started.
        Raises:
          ValueError, TypeError, StoreClosed: As for `write`.
        Cost: about 100 us; the rows of the last two requests stay in memory.
        """
        copies = [(column, tickets.copy()) for column, tickets in requests]
        columns = self.columns
        rows = [((*tickets.shape, *columns[i].shape), columns[i].dtype) for i, tickets in copies]
        return self._ahead.begin(self._look_up(copies), copies, rows)

    @records_errors
    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Do what `read` does, with the rows of request `number` if it asked for these tickets and has not been dropped.

        Waits for a request that is running. A request that failed, was dropped or asked for other rows is no error: the
        rows are read now, which raises their errors.
        """
        ok = self._ahead.take(number, requests)
        return self.read(requests) if ok is None else ok

    def _look_up(self, requests: Sequence[tuple[int, Array]]) -> Reading:
        """Find the rows of (column, tickets)."""
        wanted = [np.ascontiguousarray(t).reshape(-1) for _, t in requests]
        present: list[Array] = [np.ones(0, bool)] * len(requests)
        reading = Reading(wanted, present, [], [])
        with self._lock:
            groups: dict[int, list[int]] = {}
            for i, (column, _) in enumerate(requests):
                groups.setdefault(column, []).append(i)
            by_tickets: dict[tuple[int, ...], list[int]] = {}  # columns, by the tickets of their requests
            for column, group in groups.items():
                by_tickets.setdefault(tuple(id(requests[i][1]) for i in group), []).append(column)
            for columns in by_tickets.values():
                group = groups[columns[0]]
                sizes = [wanted[i].size for i in group]
                stops = list(itertools.accumulate(sizes, initial=0))
                spans = list(itertools.starmap(slice, itertools.pairwise(stops)))
                tickets = np.concatenate([wanted[i] for i in group]) if len(group) > 1 else wanted[group[0]]
                found = self._find_rows(columns, tickets, np.array(stops[:-1]))
                for column, (fetch, rows_present, updated, pending) in zip(columns, found, strict=True):
                    for i, span in zip(groups[column], spans, strict=True):
                        present[i] = rows_present[span]
                        for at, put in updated:
                            if span.start <= at < span.stop:
                                reading.updated.append((i, at - span.start, self.columns[column].nbytes, put))
                    reading.fetches.append((fetch, groups[column], spans, pending))
        return reading

    def _run(self, reading: Reading, outs: Sequence[Array]) -> Array:
        """Fill `outs`, one a request, and return what `read` does. Called once for each `reading`."""
        try:
            return self._fill(reading, outs)
        except StoreCorrupted as error:
            if self._path is None or self._path in str(error):
                raise
            text = str(error).replace("Store.read: ", f"Store.read: at {self._path}, ", 1)
            raise StoreCorrupted(text) from error

    def _fill(self, reading: Reading, outs: Sequence[Array]) -> Array:
        wanted, present, fetches, updated = reading
        _keep_freed(sum(out.nbytes for out in outs).bit_length())
        damaged = [fetch.run([flat(outs[i]) for i in group]) for fetch, group, *_ in fetches]
        if any(fetch.may_be_overwritten for fetch, *_ in fetches):
            with self._lock:  # rows that were overwritten while they were copied have expired by now
                at_risk = {id(rows): rows for fetch, *_, rows in fetches if fetch.may_be_overwritten}
                last = {key: self._are_readable(rows) for key, rows in at_risk.items()}
            for (fetch, group, spans, rows), bad in zip(fetches, damaged, strict=True):
                if fetch.may_be_overwritten:
                    readable = last[id(rows)]
                    raise_if_corrupted(bad, readable)
                    for i, span in zip(group, spans, strict=True):
                        present[i] = present[i] & readable[span]
        for i, at, row, put in updated:
            if present[i][at]:
                put(flat(outs[i])[at * row : (at + 1) * row])
        for out, is_present in zip(outs, present, strict=True):
            if not is_present.all() and out.nbytes:
                out.reshape(-1).view(np.uint8).reshape(len(is_present), -1)[~is_present] = 0
        oks = [is_present | np.logical_not(t) for is_present, t in zip(present, wanted, strict=True)]
        return np.concatenate(oks) if oks else np.ones(0, bool)
