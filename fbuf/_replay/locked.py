"""Decorators of the methods of a `Replay`, which hold its lock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from fbuf._core.dispatch import CALLBACK_ERRORS, raise_cause
from fbuf._replay.outside_jit import refuse_trace

F = TypeVar("F", bound=Callable[..., Any])


def restores_lock(method: F) -> F:
    """Restore the lock on error: the thread then holds what it held before the call, even after an interrupt.

    Refuse public methods inside jit.
    """
    name = method.__name__
    public = name in ("__getitem__", "__len__") or not name.startswith("_")

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
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
                raise_cause(self._engine.state, error)
            raise

    return cast(F, call)


def locked(method: F) -> F:
    """Hold the lock during the call, with every added row written."""

    @restores_lock
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._acquire():
            self._engine.flush()
            return method(self, *args, **kwargs)

    return cast(F, call)
