"""`DeferInterrupts`: no Ctrl-C between the donation of a state and the assignment of the next."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which take 30 us
import threading
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any


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
