"""`Ahead`: a thread that makes the next things while the last one is used.

The thread knows its `Ahead` and no more, so that what hands the things out can be collected while it runs. It ends when it
is told to, when it has made as many as were asked for, or with the first error, which the taker gets after what was made
before it. Nothing that was made is lost: `close` gives back what nobody took.

Rejected: a thread that is waited for when its owner is collected (collection may happen anywhere, also where the thread
waits for a lock that this very thread holds: a deadlock), and queues that are polled.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

_RUNNING: weakref.WeakSet[Ahead] = weakref.WeakSet()


class Ahead:
    """Things made by `make`, in order, at most `depth` of them waiting.

    Args:
      make: Makes the next one; called in the thread.
      depth: At least 1.
      number: How many in all, those that are `ready` included; None: no end.
      ready: The first ones, if there are some already.
    """

    def __init__(self, make: Callable[[], Any], depth: int, number: int | None, ready: Iterable[Any] = ()) -> None:
        self._make, self._depth = make, depth
        self._ready = deque(ready)
        self._left = None if number is None else number - len(self._ready)
        self._error: BaseException | None = None
        self._closed = self._over = False
        self._turn = threading.Condition()
        # A daemon, and told to stop at exit: the interpreter waits for other threads before it tells anybody.
        self._thread = threading.Thread(target=self._run, name="fbuf.torch.Loader", daemon=True)
        if not _RUNNING:
            atexit.register(_stop_all)
        _RUNNING.add(self)
        self._thread.start()

    def take(self) -> Any:
        """The next one.

        Raises:
          StopIteration: all are taken, or it is closed.
          BaseException: what `make` raised.
        """
        with self._turn:
            while not self._ready and not self._over and not self._closed:
                self._turn.wait()
            if self._closed:
                raise StopIteration
            if self._ready:
                self._turn.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            raise StopIteration

    def stop(self) -> None:
        """Tells the thread to end, and does not wait for it."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def close(self) -> list[Any]:
        """Ends the thread, after what it is making now.

        Returns:
          What was made and not taken.
        Raises:
          BaseException: what `make` raised and nobody has seen yet.
        """
        self.stop()
        if self._thread is not threading.current_thread():
            self._thread.join()
        left = list(self._ready)
        self._ready.clear()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return left

    def _run(self) -> None:
        try:
            while self._wait():
                made = self._make()
                with self._turn:
                    self._ready.append(made)
                    if self._left is not None:
                        self._left -= 1
                    self._turn.notify_all()
                del made
        except BaseException as error:
            self._error = error
        finally:
            with self._turn:
                self._over = True
                self._turn.notify_all()

    def _wait(self) -> bool:
        """Whether one more is wanted, once there is room for it."""
        with self._turn:
            while not self._closed and (self._left is None or self._left > 0) and len(self._ready) >= self._depth:
                self._turn.wait()
            return not self._closed and (self._left is None or self._left > 0)


def _stop_all() -> None:
    """At exit: a thread inside XLA while the interpreter goes down may crash it."""
    for ahead in list(_RUNNING):
        ahead.stop()
    for ahead in list(_RUNNING):
        ahead._thread.join(timeout=10)
