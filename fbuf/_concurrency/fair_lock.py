"""`FairLock`: a re-entrant lock granted in order of arrival, with a wait for changes outside it.

A `threading.Lock` mostly goes to the thread that released it last, so actors that add in a loop would starve a learner.
Here each call has a number, and the lowest waiting number gets the lock next. A call that waits for a change keeps its
number. Each thread sleeps on its own gate (`fbuf._concurrency.wakeup`), because a finalizer must be able to end it without
taking a lock. The mutex is held for a few steps only, and is re-entrant, because a signal handler may run in between.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from fbuf._concurrency import wakeup
from fbuf._concurrency.wakeup import Stopped, StopToken, WakeUp


class _Waiter:
    """One waiting call."""

    __slots__ = ("asleep", "wake_up", "number", "thread")

    def __init__(self, number: int, wake_up: WakeUp, asleep: bool):
        self.number, self.thread, self.wake_up, self.asleep = number, threading.get_ident(), wake_up, asleep


class FairLock:
    """A lock whose waiting threads are served in order of arrival."""

    forked = False  # whether this process is a forked child of the one that made the lock

    def __init__(self) -> None:
        self.mutex = threading.RLock()  # for steps that cannot wait
        self._numbers = itertools.count()
        self._waiters: list[_Waiter] = []
        self._owner = 0  # thread; 0 while the lock is free
        self._depth = 0  # nested acquisitions of the owner
        self._number = 0  # of the owner's call
        self.changes = 0  # calls of `notify` so far
        _all.add(self)

    def acquire(
        self, stop: StopToken | None = None, *, check: Callable[[], None] | None = None, notify: bool = False
    ) -> Acquired:
        """Return a context manager that holds the lock; nested use returns at once.

        Args:
          stop: Ends the wait with `Stopped`.
          check: Called with the lock held; its exceptions release the lock.
          notify: Wake the threads in `wait` on release.
        """
        return Acquired(self, stop, check, notify)

    def wait(self, until: float | None = None, stop: StopToken | None = None) -> None:
        """Release the lock until `notify`, or until `wakeup.clock` reads `until`; then hold it again.

        Raises:
          Stopped: by `stop`; the lock is released then.
        """
        waiter = _Waiter(self._number, WakeUp() if stop is None else stop.wake_up, asleep=True)
        self._queue(waiter, self._depth, stop, until=until)

    def notify(self) -> None:
        """Wake the threads in `wait`; each returns when it holds the lock."""
        with self.mutex:
            self.changes += 1
            for waiter in self._waiters:
                waiter.asleep = False
            self._wake()

    def enter(self, stop: StopToken | None = None, until: float | None = None) -> None:
        """Take the lock; raise `Stopped` by `stop`, or when `wakeup.clock` reads `until` first."""
        thread = threading.get_ident()
        with self.mutex:
            if self._owner == thread:
                self._depth += 1
                return
            number = next(self._numbers)
            if not self._owner and not self._waiters:
                self._owner, self._depth, self._number = thread, 1, number
                return
        self._queue(_Waiter(number, WakeUp() if stop is None else stop.wake_up, asleep=False), 1, stop, latest=until)

    def is_free(self) -> bool:
        """Return whether no thread holds the lock or waits for it. While the caller holds `mutex`, this stays so."""
        return not self._owner and not self._waiters

    def depth(self) -> int:
        """Return how many nested acquisitions the calling thread holds."""
        return self._depth if self._owner == threading.get_ident() else 0

    def restore(self, depth: int) -> None:
        """Release what the calling thread holds beyond `depth`. Calling it twice is harmless."""
        with self.mutex:
            if self._owner == threading.get_ident():
                self._depth = depth
                if depth == 0:
                    self._owner = 0
            if self._waiters:
                self._wake()  # also where an interrupt came before

    def _queue(
        self,
        waiter: _Waiter,
        depth: int,
        stop: StopToken | None,
        *,
        until: float | None = None,
        latest: float | None = None,
    ) -> None:
        """Release the lock, wait, and take it with `depth`. Sleep ends at `until`; the whole wait fails at `latest`."""
        try:
            with self.mutex:
                self._waiters.append(waiter)
                if self._owner == waiter.thread:
                    self._owner, self._depth = 0, 0
                    self._wake()
            while not self._granted(waiter, depth):
                if stop is not None and stop.asked:
                    raise Stopped
                end = until if waiter.asleep else latest
                left = None if end is None else end - wakeup.clock()
                if left is not None and left <= 0:
                    if not waiter.asleep:
                        raise Stopped
                    waiter.asleep = False
                else:
                    waiter.wake_up.wait(left)
        except BaseException:
            self._leave(waiter)
            raise

    def _granted(self, waiter: _Waiter, depth: int) -> bool:
        with self.mutex:
            first = None if self._owner else self._first()
            # A signal handler runs inside the waiting call of its thread, and must not wait for it.
            if first is None or waiter.asleep or first.thread != waiter.thread:
                return False
            self._waiters.remove(waiter)
            self._owner, self._depth, self._number = waiter.thread, depth, waiter.number
            return True

    def _leave(self, waiter: _Waiter) -> None:
        with self.mutex:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif self._owner == waiter.thread:
                self._owner, self._depth = 0, 0
            self._wake()

    def _first(self) -> _Waiter | None:
        return min((w for w in self._waiters if not w.asleep), key=lambda waiter: waiter.number, default=None)

    def _wake(self) -> None:
        first = None if self._owner else self._first()
        for waiter in self._waiters if first is not None else ():
            if first is not None and waiter.thread == first.thread:  # its signal handler may be the one that sleeps
                waiter.wake_up.set()


class _ForkedLock(FairLock):
    """A lock in a child process that was forked: its owner may be a thread of the parent, and JAX may hang."""

    forked = True

    def depth(self) -> int:
        raise RuntimeError(
            "Replay: this process was forked from the one that made the replay; JAX may hang here, and added rows would be "
            "lost. Start processes by multiprocessing.get_context('spawn') and send rows through a queue, or use fbuf.ray."
        )

    def is_free(self) -> bool:
        return not self.depth()


class Acquired:
    """The context manager of `FairLock.acquire`. An interrupt in `__exit__` may leave the lock held: `restore` it then."""

    __slots__ = ("_check", "_depth", "_lock", "_notify", "_stop")

    def __init__(self, lock: FairLock, stop: StopToken | None, check: Callable[[], None] | None, notify: bool):
        self._lock, self._stop, self._check, self._notify = lock, stop, check, notify
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = self._lock.depth()
        try:
            self._lock.enter(self._stop)
            if self._check is not None:
                self._check()
        except BaseException:
            self._lock.restore(self._depth)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._notify:
            self._lock.notify()
        self._lock.restore(self._depth)


_all: weakref.WeakSet[FairLock] = weakref.WeakSet()
_PATIENCE = 60.0  # seconds for the call that holds the lock


def _refuse_in_child() -> None:
    for lock in list(_all):
        lock.__class__, lock.mutex = _ForkedLock, threading.RLock()  # a thread of the parent may have the former mutex
    _all.clear()  # the end of the child waits for none


os.register_at_fork(after_in_child=_refuse_in_child)


@atexit.register
def _hold_all() -> None:
    """Take every lock for good: a thread inside XLA when the interpreter ends would crash the process."""
    for lock in list(_all):
        try:
            lock.enter(until=wakeup.clock() + _PATIENCE)
        except Stopped:
            continue
