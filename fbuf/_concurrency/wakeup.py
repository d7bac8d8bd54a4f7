"""Sleep until woken, and stop tokens, without locks: finalizers may use both.

A thread sleeps on a bare lock of its own, which any thread may release without taking another. The garbage collector runs a
finalizer in any thread, which may hold the very lock that an `Event` or `Condition` would take.
"""

from __future__ import annotations

import threading
import time

clock = time.monotonic


class Stopped(Exception):
    """The waiting thread was told to end."""


class WakeUp:
    """What one thread sleeps on."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread, now or when it sleeps next. Takes no lock."""
        try:
            self._lock.release()
        except RuntimeError:  # it is open
            return

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until `set` is called, then reset. The caller checks what has changed."""
        self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX))


class StopToken:
    """Tell one thread to end, wherever it sleeps."""

    __slots__ = ("asked", "wake_up")

    def __init__(self) -> None:
        self.asked = False
        self.wake_up = WakeUp()

    def request_stop(self) -> None:
        """Request the end. Takes no lock: a finalizer may call it."""
        self.asked = True
        self.wake_up.set()


class ReplayClosed(RuntimeError):
    """The `Replay` was closed: nothing is added or drawn any more. Its rows can still be read and saved.

    Example:
      >>> import fbuf
      >>> with fbuf.Replay(fbuf.Buffer(100), {"t": 0}) as replay:
      ...     replay.add({"t": 1})
      >>> try:
      ...     replay.add({"t": 2})
      ... except fbuf.ReplayClosed:
      ...     print(len(replay))
      1
    """
