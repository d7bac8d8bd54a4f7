"""Whose turn it is: a lock handed on in order of arrival, and a way to wait outside it until something changed.

Python's own locks go to whoever comes when they are free, which is mostly the thread that just gave one up: actors that
add in a loop would keep a learner waiting for seconds. Here each call has a number, and the lowest of those that can use
the turn gets it next. One that waits for a change (for rows, for room) keeps its number, and is looked at first when there
is one.

A thread sleeps on a gate of its own (`fbuf._concurrency.wakeup`), so that a finalizer can wake and end it. The mutex here is
held for a few steps only, never while a program runs or is waited for, and the thread that holds it may take it again: a signal
handler may come in between. The turn itself is held while a verb is dispatched, or while its owner waits for arrays:
callbacks need neither.

When the interpreter ends it takes every turn for good: a thread of the user's that sleeps here can be left alone, but one that
is stopped inside XLA takes the process down.

Rejected: `threading.Condition` (no order, and `notify` takes a lock); `queue.Queue` (the same); looking every so often
whether somebody has gone.
"""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from fbuf._concurrency import wakeup
from fbuf._concurrency.wakeup import Stopped, StopToken, WakeUp


class _Place:
    """One call that waits."""

    __slots__ = ("asleep", "wake_up", "number", "thread")

    def __init__(self, number: int, thread: int, gate: WakeUp, asleep: bool):
        self.number, self.thread, self.wake_up, self.asleep = number, thread, gate, asleep


class Turns:
    """The turn, and who waits for it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._numbers = itertools.count()
        self._places: list[_Place] = []
        self._owner = 0  # thread; 0: nobody
        self._depth = 0  # of calls in one another
        self._number = 0  # of the owner's call
        self.changes = 0  # so far
        _all.add(self)

    def turn(
        self, stop: StopToken | None = None, *, check: Callable[[], None] | None = None, changes: bool = False
    ) -> Turn:
        """A context manager: the turn, once it is this call's; at once where the thread has it already.

        Args:
          check: Called once it is; what it raises gives the turn up again.
          changes: Those who wait for a change look again after it.
        Raises:
          Stopped: by `stop`, while waiting.
        """
        return Turn(self, stop, check, changes)

    def wait(self, until: float | None = None, stop: StopToken | None = None) -> None:
        """Gives the turn up until something changed, or `clock` says `until`; the caller has it again when this returns.

        Raises:
          Stopped: by `stop`, while waiting; the turn is gone then.
        """
        place = _Place(self._number, threading.get_ident(), WakeUp() if stop is None else stop.wake_up, asleep=True)
        self._get(place, self._depth, stop, until=until)

    def changed(self) -> None:
        """Lets those who wait for a change look again, each when it is their turn."""
        with self._mutex:
            self.changes += 1
            for place in self._places:
                place.asleep = False
            self._wake()

    def enter(self, stop: StopToken | None = None, until: float | None = None) -> None:
        """Takes the turn, or takes it once more; raises Stopped if it has not got it when `clock` says `until`."""
        thread = threading.get_ident()
        with self._mutex:
            if self._owner == thread:
                self._depth += 1
                return
            number = next(self._numbers)
        place = _Place(number, thread, WakeUp() if stop is None else stop.wake_up, asleep=False)
        self._get(place, 1, stop, latest=until)

    def depth(self) -> int:
        """How often the calling thread has it."""
        return self._depth if self._owner == threading.get_ident() else 0

    def restore(self, depth: int) -> None:
        """Gives up what the calling thread has beyond `depth`; nothing if it has the turn no more. Twice is fine."""
        with self._mutex:
            if self._owner == threading.get_ident():
                self._depth = depth
                if depth == 0:
                    self._owner = 0
            self._wake()  # also where an interrupt came before

    def _get(
        self,
        place: _Place,
        depth: int,
        stop: StopToken | None,
        *,
        until: float | None = None,
        latest: float | None = None,
    ) -> None:
        """Waits in this place, with `depth` of the turn then; what the thread has of it now goes to others.

        A place that is asleep wakes by `until`, at which time the turn is still to come; at `latest` it is given up.
        """
        try:
            with self._mutex:
                self._places.append(place)
                if self._owner == place.thread:
                    self._owner, self._depth = 0, 0
                    self._wake()
            while not self._taken(place, depth):
                if stop is not None and stop.asked:
                    raise Stopped
                end = until if place.asleep else latest
                left = None if end is None else end - wakeup.clock()
                if left is not None and left <= 0:
                    if not place.asleep:
                        raise Stopped
                    place.asleep = False
                else:
                    place.wake_up.wait(left)
        except BaseException:
            self._leave(place)
            raise

    def _taken(self, place: _Place, depth: int) -> bool:
        with self._mutex:
            first = None if self._owner else self._first()
            # A signal handler comes after the call it interrupts, and must not wait for it.
            if first is None or place.asleep or first.thread != place.thread:
                return False
            self._places.remove(place)
            self._owner, self._depth, self._number = place.thread, depth, place.number
            return True

    def _leave(self, place: _Place) -> None:
        with self._mutex:
            if place in self._places:
                self._places.remove(place)
            elif self._owner == place.thread:
                self._owner, self._depth = 0, 0
            self._wake()

    def _first(self) -> _Place | None:
        return min((place for place in self._places if not place.asleep), key=lambda place: place.number, default=None)

    def _wake(self) -> None:
        first = None if self._owner else self._first()
        for place in self._places if first is not None else ():
            if first is not None and place.thread == first.thread:  # a signal handler in it may be who sleeps
                place.wake_up.set()


class Turn:
    """What `Turns.turn` gives. An interrupt while it ends may leave the turn taken: `restore` again then."""

    __slots__ = ("_changes", "_check", "_depth", "_stop", "_turns")

    def __init__(self, turns: Turns, stop: StopToken | None, check: Callable[[], None] | None, changes: bool):
        self._turns, self._stop, self._check, self._changes = turns, stop, check, changes
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = self._turns.depth()
        try:
            self._turns.enter(self._stop)
            if self._check is not None:
                self._check()
        except BaseException:
            self._turns.restore(self._depth)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._changes:
            self._turns.changed()
        self._turns.restore(self._depth)


_all: weakref.WeakSet[Turns] = weakref.WeakSet()
_PATIENCE = 60.0  # seconds for what a thread has its turn for


@atexit.register
def _end() -> None:
    """No turn is anybody's any more but this thread's."""
    for turns in list(_all):
        try:
            turns.enter(until=wakeup.clock() + _PATIENCE)
        except Stopped:
            continue
