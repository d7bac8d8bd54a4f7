"""`Replay.batches`: an iterator whose thread draws ahead, and hands batches to the device.

The thread knows what it shares with the iterator (`_Shelf`), not the iterator: that one can be forgotten, and its
finalizer then tells the thread to end, without a lock and without waiting. `close` waits until it has ended. What goes wrong
in the thread is raised by `next`, after the batches before it; or by `close`; or, if the iterator was forgotten, in the
thread, where Python prints it.

The thread draws only when there is room, so `prefetch` is how many batches are ever ahead. It sleeps on one gate, for room
as for rows. It is a daemon, for Python waits for others before it runs what is to end them; when the interpreter ends it is
told to end and waited for, as a thread that is stopped inside XLA takes the process down.

Rejected: a generator (another thread cannot close it while it runs, and what its `finally` waits for runs in the garbage
collector); a pool of threads (draws of one state follow one another); `fork` (JAX's own threads do not survive it).
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fbuf._replay._closed import ReplayClosed
from fbuf._replay._turns import Stop, Stopped, clock
from fbuf._sample import Sample

Draw = Callable[[Stop], Any]
_PATIENCE = 60.0  # seconds for what a thread is in the middle of


class _Shelf:
    """What iterator and thread share."""

    def __init__(self, room: int):
        self.stop = Stop()
        self.room = room
        self.batches: deque[Any] = deque()
        self.filled = threading.Condition()  # of a lock that its thread may take again
        self.ended = False
        self.error: BaseException | None = None
        self.raised = False
        self.heard = False  # it was raised, or will be by who waits for the thread

    def wait_for_room(self) -> bool:
        """False: the thread is to end."""
        while not self.stop.asked:
            if len(self.batches) < self.room:
                return True
            self.stop.gate.wait()
        return False

    def put(self, batch: Any) -> None:
        with self.filled:
            self.batches.append(batch)
            self.filled.notify()

    def end(self, error: BaseException | None) -> None:
        with self.filled:
            self.error, self.ended = error, True
            self.filled.notify_all()

    def take(self, until: float | None) -> Any:
        """The next batch; None: it is not there by then.

        Raises:
          StopIteration: there is none any more.
          Exception: what went wrong with it.
        """
        with self.filled:
            while not self.batches or self.stop.asked:
                if self.stop.asked:
                    raise StopIteration
                if self.error is not None:
                    self.hear()
                    self.tell()
                if self.ended:
                    raise StopIteration
                left = None if until is None else until - clock()
                if left is not None and left <= 0:
                    return None
                self.filled.wait(left)
            batch = self.batches.popleft()
        self.stop.gate.open()
        return batch

    def hear(self) -> None:
        """Whatever the error is, the thread need not print it."""
        self.heard = True
        self.stop.gate.open()

    def tell(self) -> None:
        """Raises it, if there is one."""
        if self.error is not None:
            self.raised = True
            raise self.error

    def clear(self) -> None:
        """Nobody takes anything any more."""
        with self.filled:
            self.batches.clear()
            self.filled.notify_all()


def _serve(shelf: _Shelf, draw: Draw) -> None:
    """The thread: batches, until it is told to end."""
    try:
        while shelf.wait_for_room():
            shelf.put(draw(shelf.stop))
    except (Stopped, ReplayClosed):
        shelf.end(None)
    except BaseException as error:  # whatever it is, somebody must hear of it
        shelf.end(error)
    else:
        shelf.end(None)
    while shelf.error is not None and not (shelf.heard or shelf.stop.asked):
        shelf.stop.gate.wait()
    if shelf.error is not None and not shelf.heard:
        raise shelf.error


class Batches:
    """Batches drawn ahead; an iterator, and a context manager. `Replay.batches` makes it.

    Several threads may take batches from it, and any may close it.
    """

    def __init__(self, draw: Draw, prefetch: int, timeout: float | None, explain: Callable[[], str]):
        self._shelf = _Shelf(prefetch)
        self._timeout, self._explain = timeout, explain
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, self._shelf.stop.ask)
        self._finalizer.atexit = False
        self._thread = threading.Thread(
            target=_serve, args=(self._shelf, draw), name="fbuf.Replay.batches", daemon=True
        )
        _threads[self._thread] = self._shelf.stop
        self._thread.start()

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Sample:
        """The next batch; waits for it.

        Raises:
          StopIteration: the replay was closed, and what was drawn before has been handed out; or this iterator was.
          TimeoutError: it is not there in time, and may be later.
          Exception: what went wrong with it. There are no batches after that.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "Replay.batches: this process was forked, and the thread that draws is not in it; expected the process that "
                "made the iterator. Make replay and iterator in the child."
            )
        batch = self._shelf.take(None if self._timeout is None else clock() + self._timeout)
        if batch is None:
            raise TimeoutError(f"Replay.batches: no batch in {self._timeout:g} s; {self._explain()}")
        return batch

    def close(self) -> None:
        """Ends the thread, and drops what was drawn ahead. Waits for the draw that is under way. Closing twice is fine.

        Raises:
          Exception: what went wrong in the thread, if `next` has not raised it.
        """
        self._shelf.hear()
        self._end()
        if not self._shelf.raised:
            self._shelf.tell()

    def _end(self) -> None:
        shelf = self._shelf
        shelf.stop.ask()
        shelf.clear()  # wakes those who wait for a batch
        if self._thread is not threading.current_thread() and os.getpid() == self._process:
            self._thread.join(
                _PATIENCE
            )  # not for ever: the garbage collector may be here, in a callback of that very draw
        shelf.clear()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    def __repr__(self) -> str:
        shelf = self._shelf
        how = (
            "closed" if shelf.stop.asked else "ended" if shelf.ended else f"{len(shelf.batches)} of {shelf.room} ready"
        )
        return f"Batches({how})"


_threads: weakref.WeakKeyDictionary[threading.Thread, Stop] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """Threads end before the interpreter does."""
    threads = list(_threads.items())
    for _, stop in threads:
        stop.ask()
    for thread, _ in threads:
        thread.join(_PATIENCE)
