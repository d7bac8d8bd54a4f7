"""A limit between threads: who may go on now, and in words why somebody waits.

Counts are Python ints, changed by whoever has the turn. How many rows are held is asked of the state only where the answer
may turn on it, for asking waits for the writes under way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from fbuf._concurrency import wakeup
from fbuf._concurrency.wakeup import StopToken
from fbuf._replay.fair_lock import Turns
from fbuf.limits import Limit, LimitState

Kind = Literal["add", "sample"]


class _Waiting(NamedTuple):
    """A call that may not go on."""

    call: str
    kind: Kind
    number: int
    changes: int  # how many there had been when it looked last


class Pacing:
    """A limit, how far it is, and who waits for it.

    Args:
      limit: The limit.
      pace: Of that limit, in Python ints.
      shrinks: Rows may go other than by being replaced (but for `clear`, which says so by `cleared`).
    """

    def __init__(self, limit: Limit, pace: LimitState, shrinks: bool):
        self.limit, self.pace = limit, pace
        self._shrinks = shrinks
        self._filled = False  # min_size rows are held, and will be
        self._waiting: list[_Waiting] = []
        self._warned = False

    def allows(self, kind: Kind, count: int, size: Callable[[], int]) -> bool:
        """Whether so many may be added, or drawn, while `size()` rows are held."""
        limit, pace = self.limit, self.pace
        if kind == "add":
            return bool(
                limit.can_add(pace, count) or (not self._filled and limit.can_add(pace, count, size=self._count(size)))
            )
        return bool(
            limit.can_sample(pace, count) and (self._filled or limit.can_sample(pace, count, size=self._count(size)))
        )

    def _count(self, size: Callable[[], int]) -> int:
        held = size()
        self._filled = not self._shrinks and held >= self.limit.min_size
        return held

    def done(self, kind: Kind, count: int) -> None:
        """So many were added, or drawn."""
        self.pace = (self.limit.added if kind == "add" else self.limit.sampled)(self.pace, count)

    def cleared(self) -> None:
        """No rows are held any more."""
        self._filled = False

    def wait(
        self,
        turns: Turns,
        call: str,
        kind: Kind,
        count: int,
        size: Callable[[], int],
        ready: Callable[[], bool],
        check: Callable[[], None],
        timeout: float | None,
        stop: StopToken | None = None,
    ) -> None:
        """Waits until so many may be added, or drawn; the caller has the turn, before and after.

        Args:
          call: Who waits, for messages.
          size: Rows held.
          ready: Whether they could be, were there no limit.
          check: Raises where waiting has no sense any more.
          timeout: Seconds.
        Raises:
          TimeoutError: they may not by then.
          ValueError: they never will be.
          Stopped: by `stop`.
        """
        until = None if timeout is None else wakeup.clock() + timeout
        while not (self.allows(kind, count, size) and ready()):
            self.limit.check_call(**{"rows" if kind == "add" else "draws": count})
            if until is not None and wakeup.clock() >= until:
                what, fix = (
                    (f"{count} rows have", "Sample in another thread")
                    if kind == "add"
                    else (f"{count} draws have", "Add rows in another thread")
                )
                raise TimeoutError(
                    f"{call}: {what} waited for {timeout:g} s; {self.explain(kind, count, size)}. {fix}, or give it more "
                    f"time, timeout=None."
                )
            with self._waits(call, kind, count, turns.changes, size):
                turns.wait(until, stop)
            check()

    @contextmanager
    def _waits(self, call: str, kind: Kind, count: int, changes: int, size: Callable[[], int]) -> Iterator[None]:
        """While a call waits. Warns, once, where another that waits for it looked at the same counts."""
        mine = _Waiting(call, kind, count, changes)
        for other in self._waiting:
            if other.kind != kind and other.changes == changes and not self._warned:
                self._warned = True
                self._warn(*((mine, other) if kind == "add" else (other, mine)), size)
        self._waiting.append(mine)
        try:
            yield
        finally:
            self._waiting.remove(mine)

    def _warn(self, adder: _Waiting, sampler: _Waiting, size: Callable[[], int]) -> None:
        warnings.warn(
            f"{adder.call} of {adder.number} rows and {sampler.call} of {sampler.number} draws wait for one another, for ever "
            f"unless a third thread does less at a time: {self.explain('add', adder.number, size)}; "
            f"{self.explain('sample', sampler.number, size)}. Use limits.samples_per_insert(..., rows={adder.number}, "
            f"draws={sampler.number}); if the view makes nothing of min_size rows yet, a larger min_size.",
            RuntimeWarning,
            stacklevel=2,
        )

    def explain(self, kind: Kind, count: int, size: Callable[[], int]) -> str:
        """Why so many may not be added, or drawn, now."""
        limit, pace = self.limit, self.pace
        before = limit.stats(pace)["surplus"]
        if kind == "add":
            after = limit.stats(limit.added(pace, count))["surplus"]
            bound = f"max_diff is {_number(limit.max_diff)}"
        else:
            after = limit.stats(limit.sampled(pace, count))["surplus"]
            bound = f"min_diff is {_number(limit.min_diff)}"
            held = size()
            if held < limit.min_size:
                return f"{held} rows are held, but min_size is {limit.min_size}"
            if limit.can_sample(pace, count):
                return f"{held} rows are held, but nothing of them can be drawn yet"
        return (
            f"{pace.added} rows were added and {pace.drawn} drawn, so the surplus is {before:.10g} and would be {after:.10g}, "
            f"but {bound}"
        )


def _number(value: Any) -> str:
    return "none" if value is None else f"{float(value):.10g}"


def start(limit: Limit, held: int) -> LimitState:
    """Where a buffer of `held` rows begins: as if they had been added, and drawn as often as is due."""
    ratio = limit.samples_per_insert
    pace = limit.init(added=held, host=True)
    due = max(limit.stats(pace)["surplus"] - float(ratio) * limit.min_size, 0)
    return limit.init(added=held, drawn=int(due), host=True)
