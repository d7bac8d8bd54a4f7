"""`LockedState`: a `ReplayState` behind a fair lock, and the decorators of methods that hold it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

from fbuf._buffer.checked import raise_for
from fbuf._buffer.state import COUNTERS, anchor_count
from fbuf._concurrency.wakeup import StopToken
from fbuf._core.dispatch import CALLBACK_ERRORS, raise_cause
from fbuf._core.pytree import PyTree
from fbuf._core.text_table import counted
from fbuf._replay.fair_lock import Acquired, FairLock
from fbuf._replay.outside_jit import refuse_trace
from fbuf._replay.state import ReplayState

F = TypeVar("F", bound=Callable[..., Any])


def restores_lock(method: F) -> F:
    """Restore the lock on error: the thread then holds what it held before the call, even after an interrupt.

    Refuse public methods inside jit.
    """
    name = method.__name__
    public = name in ("__getitem__", "__len__") or not name.startswith("_")

    @functools.wraps(method)
    def call(self: LockedState, *args: Any, **kwargs: Any) -> Any:
        if public:
            refuse_trace(name, args, kwargs)
        depth = self._lock.depth()
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if self._lock.depth() > depth:
                self._lock.notify()  # the interrupt may have prevented it
            self._lock.restore(depth)
            if isinstance(error, CALLBACK_ERRORS):
                raise_cause(self._state, error)
            raise

    return cast(F, call)


def locked(method: F) -> F:
    """Hold the lock during the call, with every added row written."""

    @restores_lock
    @functools.wraps(method)
    def call(self: LockedState, *args: Any, **kwargs: Any) -> Any:
        with self._acquire():
            self._flush()
            return method(self, *args, **kwargs)

    return cast(F, call)


class LockedState(ReplayState):
    """A state that threads share, and the errors of what its methods counted."""

    strict: bool
    _lock: FairLock
    _closed: bool
    _ahead: bool  # stale indices are expected

    def _acquire(self, *, notify: bool = False, stop: StopToken | None = None) -> Acquired:
        """Hold the lock; with `notify`, wake the waiting calls on release."""
        return self._lock.acquire(stop, check=self._check_state, notify=notify)

    def _collect_now(self, row: PyTree, mask: Any) -> bool:
        """Keep one row for a later write if the lock is free; return whether it was kept."""
        with self._lock.mutex:
            block = self._block
            free = self._lock.is_free() and not self._closed and not self._state.header.is_deleted()
            return free and block is not None and block.count + 1 < block.length and block.append(row, mask)

    def _check_state(self) -> None:
        if self._state.header.is_deleted():
            self._lock.notify()  # waiting calls must raise too
            raise RuntimeError(
                "Replay: its state was donated. Assign the state that your step returns, `replay.state = step(replay.state)`; "
                "after a step that failed `del replay`, and use Replay.load(path), or Replay(buffer, example, resume=True) for "
                "rows in files."
            )

    def _explain_empty(self, call: str) -> None:
        """Raise for a draw from rows that all need later ones. Return if there are no rows, or some only were drawn already."""
        ahead = self.buffer.view.rule.ahead
        with self._acquire():
            held, count = self._held(), int(np.asarray(anchor_count(self._state)).sum())
        if held and ahead and not count:
            raise ValueError(
                f"{call}: none of the {counted(held, 'row')} held can be sampled yet; {self.buffer.view!r} needs up to {ahead} "
                f"more of its episode and lane after a row. Add rows, or ask can_sample first."
            )

    def _raise(self, call: str, counts: jax.Array | None) -> None:
        """Raise for what a call only counted. Wait for it without the lock."""
        if self.strict and counts is not None and (new := np.asarray(counts)).any():
            if new[COUNTERS.index("empty_samples")]:
                self._explain_empty(call)
            hint = "Replay(..., strict=False) counts them in stats() instead."
            raise_for(call, np.zeros_like(new), new, hint, ahead=self._ahead)
