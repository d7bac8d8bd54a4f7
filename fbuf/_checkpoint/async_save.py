"""Saves that run in a thread: their handle.

`Saving.result` raises an error of its save; otherwise the next save to that path raises it, or it is printed at exit. A
process waits for its saves before it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fbuf._formats import checkpoint

_lock = threading.RLock()  # reentrant, since a signal handler may save too
_latest: dict[str, Saving] = {}
"""By path: a save that is running, or failed without being reported."""
_path_locks: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""By path: the lock held while a save starts."""


class Saving:
    """Hold a running or finished save: wait for it, or read its result.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fbuf.save(f"{folder}/replay", buffer, state, wait=False)
      ...     written = saving.result()  # raises the save's error
      >>> written.generation, saving.done()
      (1, True)
    """

    def __init__(self, path: str, work: Callable[[], checkpoint.Written], *, wait: bool):
        self._path, self._work = path, work
        self._error: BaseException | None = None
        self._written: checkpoint.Written | None = None
        self._thread: threading.Thread | None = None
        if wait:
            try:
                self._written = work()
            finally:
                self._work = _released  # it holds the state's arrays
            return
        self._thread = threading.Thread(target=self._run, name=f"fbuf.save {path}", daemon=False)
        with _lock:
            _latest[_key(path)] = self
        try:
            self._thread.start()
        except BaseException:  # too many threads, or the process is ending
            self._forget()
            raise

    def _run(self) -> None:
        time.sleep(0)  # gives the interpreter to the caller, which waits for it in `Thread.start`
        try:
            self._written = self._work()
        except BaseException as error:  # reported by `result`, the next save, or at exit
            traceback.clear_frames(error.__traceback__)  # which hold copies of the state
            self._error = error
        finally:
            self._work = _released
            with _lock:
                if self._error is None and _latest.get(_key(self._path)) is self:
                    del _latest[_key(self._path)]

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error. Never waits."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the save has ended.

        Raises:
          TimeoutError: it has not after `timeout` seconds; it continues.
          Exception: the save's error; the checkpoint before it is intact.
        """
        self.result(timeout)

    def result(self, timeout: float | None = None) -> checkpoint.Written:
        """Wait; return the generation, bytes written, and bytes of all arrays. Raises as `wait`."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"Saving.result: the save to {self._path} has not ended after {timeout} seconds.")
        if self._error is not None:
            self._forget()
            raise self._error
        assert self._written is not None
        return self._written

    def _forget(self) -> None:
        with _lock:
            if _latest.get(_key(self._path)) is self:
                del _latest[_key(self._path)]

    def __repr__(self) -> str:
        how = "under way" if not self.done() else "failed" if self._error is not None else f"{self._written}"
        return f"Saving({self._path!r}, {how})"


def _released() -> checkpoint.Written:
    raise AssertionError("a save runs once")


def _key(path: str) -> str:
    return os.path.realpath(path)


@contextlib.contextmanager
def exclusive_save(path: str) -> Iterator[None]:
    """Block this process's other saves to a path while one starts.

    Raises:
      Exception: the error of the save before, if it was not reported.
    """
    with _lock:
        mine = _path_locks.setdefault(_key(path), threading.RLock())
    with mine:
        _finish(path)
        yield


def _finish(path: str) -> None:
    """Wait for a running save to a path; raise its error if it was not reported."""
    with _lock:
        earlier = _latest.get(_key(path))
    if earlier is not None:
        try:
            earlier.result()
        except Exception as error:
            error.add_note(f"fbuf.save: the previous save to {path}, wait=False, raised this. Save again.")
            raise


@atexit.register
def _report() -> None:
    """Print errors that were never reported. All threads have ended."""
    with _lock:
        unseen = [saving for saving in _latest.values() if saving._error is not None]
    for saving in unseen:
        error: Any = saving._error
        print(f"fbuf.save: a save to {saving._path} failed, and its result() was never called:", file=sys.stderr)
        traceback.print_exception(error, file=sys.stderr)
