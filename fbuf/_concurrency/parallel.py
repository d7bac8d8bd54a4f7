"""Run tasks in threads: several at a time (`run_parallel`), or one in the background (`BackgroundTask`).

`zlib.crc32`, `pread`, `pwrite` and `fsync` release the GIL, so a file can be synced while others are written. The caller runs
a task itself when it wants the result of one that no thread has begun.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, Self, TypeVar

Advance = Callable[[int], None]


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
            if not all(_is_well(task) for task in tasks):
                stop.set()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, Cancelled):
            raise error


def _is_well(task: Future[None]) -> bool:
    return task.done() and task.exception() is None


Made = TypeVar("Made")


class Task:
    """A call to be made once, by the first thread that is free."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._begun, self._ended = threading.Lock(), Future[Any]()

    def run(self) -> None:
        """Make the call, unless another thread has begun."""
        if self._begun.acquire(blocking=False):
            assert self._call is not None
            try:
                self._ended.set_result(self._call())
            except BaseException as error:  # `result` raises it
                self._ended.set_exception(error)
            finally:
                self._call = None  # release its arguments

    def result(self) -> Any:
        """Make the call or wait for it; return or raise its result."""
        self.run()
        return self._ended.result()


class BackgroundTask:
    """A thread that starts with the first task and ends with the `with` block; without one, tasks run at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = cores() < 2

    def submit(self, function: Callable[..., Made], *args: Any) -> Callable[[], Made]:
        """Queue a task; return a function that returns or raises its result."""
        if self._thread is None and not self._alone:
            thread = threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # no room for another, or the process is ending
                self._alone = True
        task = Task(functools.partial(function, *args))
        if self._thread is None:
            task.run()
        else:
            self._tasks.put(task)
        return task.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
