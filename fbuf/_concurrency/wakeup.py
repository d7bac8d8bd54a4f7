"""How a thread sleeps so that anybody may wake or end it, a finalizer included.

A thread sleeps on a gate of its own, a bare lock that anybody may open without taking another. So a finalizer, which the
garbage collector runs in any thread and between any two steps, can wake and end a thread (`StopToken`); it may take no lock,
for the thread it runs in may hold that very one.

Rejected: `threading.Event` and `threading.Condition` (setting and notifying take a lock).
"""

from __future__ import annotations

import threading
import time

clock = time.monotonic


class Stopped(Exception):
    """The thread that waits was told to end."""


class WakeUp:
    """What one thread sleeps on."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wakes it, now or when it is about to sleep next; takes no lock."""
        try:
            self._lock.release()
        except RuntimeError:  # it is open
            return

    def wait(self, seconds: float | None = None) -> None:
        """Sleeps until it is opened; it is shut again then. Whoever wakes looks for himself what has changed."""
        self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX))


class StopToken:
    """Tells one thread to end, wherever it sleeps."""

    __slots__ = ("asked", "wake_up")

    def __init__(self) -> None:
        self.asked = False
        self.wake_up = WakeUp()

    def request_stop(self) -> None:
        """Takes no lock: a finalizer may call it."""
        self.asked = True
        self.wake_up.set()


class ReplayClosed(RuntimeError):
    """The `Replay` was closed: nothing is added or drawn any more. What is held can still be read and saved.

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
