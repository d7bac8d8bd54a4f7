"""`DeferInterrupts`: no Ctrl-C between the donation of a state and the assignment of the next, or in a callback."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which take 30 us
import _thread
import threading
import time
from collections.abc import Callable
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any

_RETURNED = 0.01  # seconds after which a callback has returned


class DeferInterrupts:
    """Delay Ctrl-C while a write holds the only reference to the donated state.

    Python handles signals between any two steps, also between the return of a jitted call and the assignment of its result.
    """

    __slots__ = ("_handler", "_interrupt")

    def __init__(self) -> None:
        self._handler: Any = None
        self._interrupt: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(SIGINT)
            if callable(handler):  # else it is ignored, or not Python's, and never raises
                try:
                    _signal.signal(SIGINT, self._note)
                except ValueError:  # the main thread of another interpreter
                    return
                self._handler = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _signal.signal(SIGINT, self._handler)
            if self._interrupt is not None:
                self._handler(*self._interrupt)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupt = number, frame


def uninterrupted(callback: Callable[..., None], *operands: Any) -> None:
    """Delay Ctrl-C until a callback has returned: a write of the store is complete then, and XLA makes no other error of it."""
    deferred = DeferInterrupts()
    deferred.__enter__()
    try:
        callback(*operands)
    finally:
        if (handler := deferred._handler) is not None:
            _signal.signal(SIGINT, handler)
            if deferred._interrupt is not None:
                if isinstance(getattr(handler, "__self__", None), DeferInterrupts):
                    handler(*deferred._interrupt)
                elif getattr(handler, "__name__", "") != "_sighandler_noop":  # asyncio reads the signal from a socket
                    _thread.start_new_thread(_interrupt_later, ())


def _interrupt_later() -> None:
    time.sleep(_RETURNED)
    if hasattr(_signal, "pthread_kill"):  # also wakes what the thread waits in
        _signal.pthread_kill(threading.main_thread().ident, SIGINT)
    else:
        _signal.raise_signal(SIGINT)
