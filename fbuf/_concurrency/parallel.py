"""Several long tasks at a time, in threads: the first that fails ends the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait


class Stopped(Exception):
    """Raised in a task that another's failure, or an interrupt, ends."""


def together(
    numbers: Sequence[int],
    run: Callable[[int, Callable[[int], None]], None],
    advance: Callable[[int], None],
    workers: int,
) -> None:
    """Runs `run(number, step)` for each number, `workers` at a time; 0 and 1: one after another, in this thread.

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
            raise Stopped
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
        if not isinstance(error, Stopped):
            raise error


def _is_well(task: Future[None]) -> bool:
    return task.done() and task.exception() is None
