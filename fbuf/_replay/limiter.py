"""`BlockingLimiter`: a `Limit` shared by threads; calls wait until it allows them.

Counts are Python ints, changed with the replay's lock held. The number of rows held is read from the state only where the
answer depends on it, because reading waits for pending writes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from fbuf._concurrency import wakeup
from fbuf._concurrency.fair_lock import FairLock
from fbuf._concurrency.wakeup import StopToken
from fbuf._core.text_table import counted
from fbuf.limits import Limit, LimitState

Kind = Literal["add", "sample"]
PATIENCE = 10.0
"""Seconds in which nothing changes, after which a call without a timeout prints what it waits for."""


class LimitTimeout(TimeoutError):
    """A limit did not allow a call in time. Python also raises `TimeoutError` for ETIMEDOUT, of network disks."""


class _Waiting(NamedTuple):
    """A call that the limit does not allow yet."""

    call: str
    kind: Kind
    number: int
    changes: int  # `FairLock.changes` when it last checked


class BlockingLimiter:
    """A limit, its counts, and the calls that wait for it.

    Args:
      limit: The limit.
      pace: Its state, in Python ints.
      shrinks: Rows may be evicted before the buffer is full.
      size: Returns the number of rows held.
    """

    def __init__(self, limit: Limit, pace: LimitState, shrinks: bool, size: Callable[[], int]):
        self.limit, self.pace = limit, pace
        self._shrinks, self._size = shrinks, size
        self._reached = False  # min_size rows are held, and will be until `clear`
        self._waiting: list[_Waiting] = []
        self._warned = self._has_printed = False

    def allows(self, kind: Kind, count: int) -> bool:
        """Return whether `count` rows may be added, or drawn, now."""
        limit, pace = self.limit, self.pace
        if kind == "add":
            free = limit.can_add(pace, count)
            return bool(free or (not self._reached and limit.can_add(pace, count, size=self._count())))
        ready = limit.can_sample(pace, count)
        return bool(ready and (self._reached or limit.can_sample(pace, count, size=self._count())))

    def _count(self) -> int:
        size = self._size()
        self._reached = not self._shrinks and size >= self.limit.min_size
        return size

    def done(self, kind: Kind, count: int) -> None:
        """Count rows that were added, or drawn."""
        self.pace = (self.limit.added if kind == "add" else self.limit.sampled)(self.pace, count)

    def cleared(self) -> None:
        """Note that no rows are held."""
        self._reached = False

    def wait(
        self,
        lock: FairLock,
        call: str,
        kind: Kind,
        count: int,
        ready: Callable[[], bool],
        check: Callable[[], None],
        timeout: float | None,
        stop: StopToken | None = None,
    ) -> None:
        """Wait until `count` rows may be added, or drawn. The caller holds the lock before and after.

        Args:
          ready: Whether the call could proceed without a limit.
          check: Called after each wait; raises where waiting is pointless.
          timeout: Seconds.
        Raises:
          LimitTimeout: the limit did not allow them in time.
          ValueError: the limit will never allow them.
          Stopped: by `stop`.
        """
        until = None if timeout is None else wakeup.clock() + timeout
        while not (self.allows(kind, count) and ready()):
            self.limit.check_call(**{"rows" if kind == "add" else "draws": count})
            if until is not None and wakeup.clock() >= until:
                what, fix = ("row", "Sample") if kind == "add" else ("draw", "Add rows")
                raise LimitTimeout(
                    f"{call}: waited {timeout:g} s for {counted(count, what)}; {self.explain(kind, count)}. {fix} in another "
                    f"thread, or raise timeout."
                )
            before, silent = lock.changes, until is None and not self._has_printed
            patient = wakeup.clock() + PATIENCE if silent else until
            with self._registered(_Waiting(call, kind, count, before)):
                lock.wait(patient, stop)
            check()
            if silent and patient is not None and lock.changes == before and wakeup.clock() >= patient:
                self._has_printed = True
                fix = "Sample" if kind == "add" else "Add rows"
                print(
                    f"fbuf: {call} waits, and nothing has changed in {PATIENCE:g} s; {self.explain(kind, count)}. {fix} in "
                    f"another thread, or pass timeout= to raise an error.",
                    file=sys.stderr,
                )

    @contextmanager
    def _registered(self, call: _Waiting) -> Iterator[None]:
        """Register a waiting call. Warn once if it and another wait for each other at the same counts."""
        for other in self._waiting:
            if other.kind != call.kind and other.changes == call.changes and not self._warned:
                self._warned = True
                self._warn(*((call, other) if call.kind == "add" else (other, call)))
        self._waiting.append(call)
        try:
            yield
        finally:
            self._waiting.remove(call)

    def _warn(self, adder: _Waiting, sampler: _Waiting) -> None:
        warnings.warn(
            f"{adder.call} of {counted(adder.number, 'row')} and {sampler.call} of {counted(sampler.number, 'draw')} wait "
            f"for each other: "
            f"{self.explain('add', adder.number)}; {self.explain('sample', sampler.number)}. Use "
            f"limits.samples_per_insert(..., rows={adder.number}, draws={sampler.number}), or a larger min_size.",
            RuntimeWarning,
            stacklevel=2,
        )

    def explain(self, kind: Kind, count: int) -> str:
        """Return why `count` rows may not be added, or drawn, now."""
        limit, pace = self.limit, self.pace
        if kind == "add" and self.allows(kind, count):
            return "the queue has no room until more rows are drawn"
        if kind == "add":
            after, bound = limit.added(pace, count), f"max_diff is {_number(limit.max_diff)}"
        else:
            after, bound = limit.sampled(pace, count), f"min_diff is {_number(limit.min_diff)}"
            size = self._size()
            if size < limit.min_size:
                return f"{counted(size, 'row')} held, but min_size is {limit.min_size}"
            if limit.can_sample(pace, count):
                return f"{counted(size, 'row')} held, but too few of them can be sampled yet"
        before, then = (limit.stats(p)["surplus"] for p in (pace, after))
        return (
            f"{counted(pace.added, 'row')} added and {pace.drawn} drawn, so the surplus is {before:.10g} and would be "
            f"{then:.10g}, but {bound}"
        )


def _number(value: Any) -> str:
    return "none" if value is None else f"{float(value):.10g}"


def start(limit: Limit, size: int) -> LimitState:
    """Return the counts of a buffer that already holds `size` rows, drawn as often as the limit expects."""
    pace = limit.init(added=size, host=True)
    due = max(limit.stats(pace)["surplus"] - float(limit.samples_per_insert) * limit.min_size, 0)
    return limit.init(added=size, drawn=int(due), host=True)
