"""Ctrl-C waits while a write has the state, which is donated and nobody's until the call returns the next one.

Python looks for signals between any two of its steps, also between the return of a call and the assignment of what it
returned, and inside a callback of a host storage that runs in the main thread: one Ctrl-C in four took the state of a loop of
small writes with it. Only the main thread is ever interrupted; it waits as long as one dispatch, or one compilation, takes.

Rejected: C code that calls and assigns in one step (`list.extend` of a `map`), as programs with callbacks are dispatched by
Python; a signal mask, since another thread takes the signal then; dispatch in a helper thread (30 us).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """A context manager; what interrupted it is raised, or handled, when it ends."""

    __slots__ = ("_before", "_came")

    def __init__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # ignored, or not Python's: it never raises
                try:
                    signal.signal(signal.SIGINT, self._note)
                except ValueError:  # the main thread of another interpreter
                    return
                self._before = before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame
