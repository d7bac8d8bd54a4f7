"""Saves that go on in a thread: what they did, and that nobody misses it if one fails.

An error is raised by `Saving.result` and `wait`; if neither was asked, by the next save to that path; and if there is none, it
is printed when the process ends. A process that ends waits for its saves first (threads that are no daemons). A second save
to a path waits for the one under way, so that saves cannot pile up.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fbuf._formats import checkpoint

_lock = threading.RLock()  # a signal handler may save too
_latest: dict[str, Saving] = {}
"""By path: one that is under way, or failed unseen."""
_turns: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""By path: the lock of who is beginning a save there."""


class Saving:
    """A save under way, or done.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fbuf.save(f"{folder}/replay", buffer, state, wait=False)
      ...     written = saving.result()  # raises what went wrong
      >>> written.generation, saving.done()
      (1, True)
    """

    def __init__(self, path: str, work: Callable[[], checkpoint.Written], *, wait: bool):
        self._path, self._work = path, work
        self._error: BaseException | None = None
        self._written: checkpoint.Written | None = None
        self._seen = False
        self._thread: threading.Thread | None = None
        if wait:
            try:
                self._written = work()
            finally:
                self._work = _nothing  # it holds the state's arrays
            return
        self._thread = threading.Thread(target=self._run, name=f"fbuf.save {path}", daemon=False)
        with _lock:
            _latest[_key(path)] = self
        try:
            self._thread.start()
        except BaseException:  # no room for another, or the process is ending
            self._see()
            raise

    def _run(self) -> None:
        try:
            self._written = self._work()
        except BaseException as error:  # whatever it is, somebody must hear of it
            self._error = error
        finally:
            self._work = _nothing
            with _lock:
                if self._error is None and _latest.get(_key(self._path)) is self:
                    del _latest[_key(self._path)]

    def done(self) -> bool:
        """Whether it has ended, well or not. Never waits."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until it has ended.

        Raises:
          TimeoutError: it has not after `timeout` seconds; it goes on.
          Exception: what went wrong; the checkpoint before it is whole.
        """
        self.result(timeout)

    def result(self, timeout: float | None = None) -> checkpoint.Written:
        """The same, and what was written: generation, bytes written, bytes in all."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"Saving.result: the save to {self._path} has not ended after {timeout} seconds.")
        if self._error is not None:
            self._see()
            raise self._error
        assert self._written is not None
        return self._written

    def _see(self) -> None:
        self._seen = True
        with _lock:
            if _latest.get(_key(self._path)) is self:
                del _latest[_key(self._path)]

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "failed" if self._error is not None else f"{self._written}"
        return f"Saving({self._path!r}, {how})"


def _nothing() -> checkpoint.Written:
    raise AssertionError("a save runs once")


def _key(path: str) -> str:
    return os.path.realpath(path)


@contextlib.contextmanager
def turn(path: str) -> Iterator[None]:
    """Keeps this process's other saves to the same path waiting, while one looks what is new and writes it, or begins to.

    Raises:
      Exception: what went wrong with the save before, if nobody has seen that.
    """
    with _lock:
        mine = _turns.setdefault(_key(path), threading.RLock())
    with mine:
        _finish(path)
        yield


def _finish(path: str) -> None:
    """Waits for a save to the same path; raises what went wrong with it, if nobody has seen that."""
    with _lock:
        earlier = _latest.get(_key(path))
    if earlier is not None:
        try:
            earlier.result()
        except Exception as error:
            error.add_note(f"fbuf.save: this is how the save before, wait=False, to {path} ended. Save again.")
            raise


@atexit.register
def _report() -> None:
    """Prints what nobody asked about. Threads have ended by then."""
    with _lock:
        unseen = [saving for saving in _latest.values() if saving._error is not None]
    for saving in unseen:
        error: Any = saving._error
        print(f"fbuf.save: a save to {saving._path} failed, and nobody asked for its result():", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
