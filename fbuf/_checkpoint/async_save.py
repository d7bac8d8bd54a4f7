"""Saves that run in a thread: the copy they write from, and their handle.

`Snapshot` copies the blocks that the last save lacks, so that the state may be donated at once. `Saving.result` raises an
error of its save; otherwise the next save to that path raises it, or it is printed at exit. A process waits for its saves
before it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fbuf._checkpoint.device_arrays import SMALL, hash_bytes, rows_of_block
from fbuf._formats import checkpoint


class Snapshot:
    """A source, copied as far as `last` (that array in the last save, or None) lacks it."""

    def __init__(self, name: str, source: Any, last: Any):
        self._name = name
        self.shape, self.dtype = tuple(source.shape), np.dtype(source.dtype)
        self.cuts: Sequence[int] | None = getattr(source, "cuts", None)
        self.keys: Sequence[str] | None = getattr(source, "keys", None)
        if self.cuts is None:
            self.block = getattr(source, "block", None) or rows_of_block(self.shape, self.dtype.itemsize)
            rows = self.shape[0]
            starts = [*range(0, rows, self.block), rows]
        else:
            starts = list(self.cuts)
        spans = self._spans = list(zip(starts, starts[1:], strict=False))
        marks: Sequence[str | None] | None = getattr(source, "marks", None)
        known = _known(self, last)
        large = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize > SMALL
        if marks is None and large and known:
            marks = [hash_bytes(source[a:b]) for a, b in spans]
        self._pieces: dict[tuple[int, int], np.ndarray] = {}
        self._marks, self._large = marks, large
        for i, (a, b) in enumerate(spans):
            mark = None if marks is None else marks[i]
            if mark is None or known.get(i if self.keys is None else self.keys[i]) != (mark, b - a):
                self._pieces[a, b] = np.array(source[a:b])  # a copy: what it came from may be donated

    @property
    def nbytes(self) -> int:
        """Bytes copied."""
        return sum(piece.nbytes for piece in self._pieces.values())

    @property
    def marks(self) -> Sequence[str | None] | None:
        """Of each block. Where nobody knew any, all were copied, and are looked at now."""
        if self._marks is None and self._large:
            self._marks = [hash_bytes(self._pieces[span]) for span in self._spans]
        return self._marks

    def __getitem__(self, at: slice) -> np.ndarray:
        start, stop, _ = at.indices(self.shape[0])
        piece = self._pieces.get((start, stop))
        if piece is None:
            raise RuntimeError(
                f"fbuf.save: rows {start} to {stop} of array '{self._name}' had not changed since the last save, and were not "
                f"copied; but what that save wrote is damaged, or another process has saved since. Save once with wait=True."
            )
        return piece


def _known(held: Snapshot, last: Any) -> dict[Any, tuple[str, int]]:
    """Mark and rows of each block of the last save, by number or key, where its blocks can be taken for these."""
    marks = None if last is None else getattr(last, "marks", None)
    same = last is not None and last.dtype == held.dtype and last.shape[1:] == held.shape[1:]
    if marks is None or not same or (last.keys is None) != (held.keys is None):
        return {}
    if held.keys is None:
        if last.block != held.block:
            return {}
        starts = [*range(0, last.shape[0], last.block), last.shape[0]]
        names: Sequence[Any] = range(len(starts) - 1)
    else:
        starts, names = list(last.cuts), last.keys
    return {names[i]: (mark, starts[i + 1] - starts[i]) for i, mark in enumerate(marks) if mark is not None}


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
