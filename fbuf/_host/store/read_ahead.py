"""Decode rows ahead of `sample`, in the thread `fbuf-read-ahead`.

A request is only a hint: `take` returns its rows if it asked for these tickets and succeeded; otherwise the store reads as if
there had been no request. A request that no thread has begun is run by the caller of `take`. Rows of a raw column are read
before the write that may overwrite them. The thread knows its queue only, and a request its store weakly, so neither keeps a
store alive. The thread ends with the store or the interpreter; after a fork the child starts its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from fbuf._host.types import Array, Fetch


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
