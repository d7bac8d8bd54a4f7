"""Prefetch items in a thread: `Replay.batches` and torch's `Loader` use it (`fbuf._host.store.read_ahead` decodes ahead).

The thread knows its `Prefetch` only, not the iterator that owns it. When the iterator is collected, its finalizer tells the
thread to end, without a lock and without waiting; `end` waits. An error in the thread is raised by `take`, after the items
made before it, or by `check`; if the iterator was collected, Python prints it.

The thread makes an item only when there is room, and sleeps on one wake-up for all it waits for. It is a daemon: at exit it
is told to end and joined, since a thread that is stopped inside XLA crashes the process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fbuf._concurrency import wakeup
from fbuf._concurrency.wakeup import ReplayClosed, Stopped, StopToken

Make = Callable[[StopToken], Any]
_PATIENCE = 60.0  # seconds for what a thread is in the middle of


class Prefetch:
    """Items made by `make`, in order, at most `room` of them waiting. A closed replay ends them.

    Args:
      owner: Who hands them out: once it is collected the thread ends.
      name: The thread's.
      make: Makes the next one; called in the thread, with what tells it to end.
      room: At least 1.
      number: How many in all, those that are `ready` included; None: no end.
      ready: The first ones, if there are some already.
    """

    def __init__(
        self, owner: object, name: str, make: Make, room: int, *, number: int | None = None, ready: Iterable[Any] = ()
    ):
        self.stop, self.room = StopToken(), room
        self.ended = False
        self._ready = deque(ready)
        self._left = None if number is None else number - len(self._ready)
        self._filled = threading.Condition()  # of a lock that its thread may take again
        self._error: BaseException | None = None
        self._raised = False
        self._heard = False  # it was raised, or will be by who waits for the thread
        self._process = os.getpid()
        weakref.finalize(owner, self.stop.request_stop).atexit = False
        self._thread = threading.Thread(target=_serve, args=(self, make), name=name, daemon=True)
        _at_exit()
        _threads[self._thread] = self.stop
        self._thread.start()

    def __len__(self) -> int:
        """Return how many items wait to be taken."""
        return len(self._ready)

    def take(self, until: float | None = None) -> Any:
        """Return the next item; None if it is not there by `until`, a time of `wakeup.clock`.

        Raises:
          StopIteration: there is none any more.
          BaseException: what went wrong with it.
        """
        with self._filled:
            while not self._ready or self.stop.asked:
                if self.stop.asked:
                    raise StopIteration
                if self._error is not None:
                    self.hear()
                    self._tell()
                if self.ended:
                    raise StopIteration
                left = None if until is None else until - wakeup.clock()
                if left is not None and left <= 0:
                    return None
                self._filled.wait(left)
            made = self._ready.popleft()
        self.stop.wake_up.set()
        return made

    def end(self) -> list[Any]:
        """End the thread after its current item; return the items that were not taken."""
        self.stop.request_stop()
        if os.getpid() != self._process:  # a forked child, whose thread there is not, may have its lock
            return []
        with self._filled:
            self._filled.notify_all()  # wake callers of `take`
        if self._thread is not threading.current_thread():
            # With a timeout: this may run in the garbage collector, inside `make`.
            self._thread.join(_PATIENCE)
        with self._filled:
            left = list(self._ready)
            self._ready.clear()
        return left

    def hear(self) -> None:
        """Promise that `take` or `check` is called for an error, so that the thread does not print it."""
        self._heard = True
        self.stop.wake_up.set()

    def check(self) -> None:
        """Raise the error of the thread, if `take` has not."""
        if not self._raised:
            self._tell()

    def _tell(self) -> None:
        if self._error is not None:
            self._raised = True
            raise self._error

    # What the thread calls.

    def wait_for_room(self) -> bool:
        """Wait for room; return False if the thread must end."""
        while not self.stop.asked and self._left != 0:
            if len(self._ready) < self.room:
                return True
            self.stop.wake_up.wait()
        return False

    def put(self, made: Any) -> None:
        """Add an item."""
        with self._filled:
            self._ready.append(made)
            if self._left is not None:
                self._left -= 1
            self._filled.notify()

    def finish(self, error: BaseException | None) -> None:
        """Mark the end of the items."""
        with self._filled:
            self._error, self.ended = error, True
            self._filled.notify_all()

    def wait_for_hearer(self) -> None:
        """Wait until the error, if there is one, has been or will be raised; raise it here if the owner is gone."""
        while self._error is not None and not (self._heard or self.stop.asked):
            self.stop.wake_up.wait()
        if self._error is not None and not self._heard:
            raise self._error


def _serve(prefetch: Prefetch, make: Make) -> None:
    """Make items until the thread is told to end."""
    try:
        with contextlib.suppress(Stopped, ReplayClosed):
            while prefetch.wait_for_room():
                prefetch.put(make(prefetch.stop))
        prefetch.finish(None)
    except BaseException as error:  # `take` or `check` raises it
        prefetch.finish(error)
    prefetch.wait_for_hearer()


_threads: weakref.WeakKeyDictionary[threading.Thread, StopToken] = weakref.WeakKeyDictionary()


@functools.cache
def _at_exit() -> None:
    """Register, once, the end of all threads at exit."""
    atexit.register(_end)


def _end() -> None:
    threads = list(_threads.items())
    for _, stop in threads:
        stop.request_stop()
    for thread, _ in threads:
        thread.join(_PATIENCE)
