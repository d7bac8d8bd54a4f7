"""Run tasks in threads, several at a time.

`zlib.crc32`, `pread`, `pwrite` and `fsync` release the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

Advance = Callable[[int], None]


class BackgroundCall:
    """A call that runs in a thread. A call that no thread can run (the process ends) has run when this returns."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fbuf-call")
        try:
            self._thread.start()
        except RuntimeError:
            self._run()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Wait for the end of the call."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> None:
        """Wait for the end of the call. Raises what it raised."""
        self.join()
        if self._error is not None:
            raise self._error


class Cancelled(Exception):
    """Raised in a task that is ended by the failure of another, or by an interrupt."""


def run_parallel(numbers: Sequence[int], run: Callable[[int, Advance], None], advance: Advance, workers: int) -> None:
    """Run `run(number, step)` for each number, `workers` at a time; with 0 or 1, one after another in this thread.

    Args:
      run: Calls `step(amount)` now and then.
      advance: Called with these amounts, by one thread at a time.
      workers: Threads.
    Raises:
      What the first task to fail raised, once all have ended.
    """
    if workers <= 1 or len(numbers) <= 1:
        for number in numbers:
            run(number, advance)
        return
    lock, stop = threading.Lock(), threading.Event()

    def step(amount: int) -> None:
        if stop.is_set():
            raise Cancelled
        with lock:
            advance(amount)

    def task(number: int) -> None:
        if not stop.is_set():
            run(number, step)

    with ThreadPoolExecutor(min(workers, len(numbers)), thread_name_prefix="fbuf-together") as pool:
        tasks = [pool.submit(task, number) for number in numbers]
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
        finally:  # an interrupt comes here, too
            if not all(task.done() and task.exception() is None for task in tasks):
                stop.set()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, Cancelled):
            raise error
