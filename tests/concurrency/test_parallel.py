"""Test `run_parallel` and `BackgroundTask`: each task runs once, and its error reaches the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fbuf._concurrency import parallel
from fbuf._concurrency.parallel import BackgroundTask, run_parallel
from tests.support.threads import PATIENCE


def endless(step: Callable[[int], None]) -> None:
    """Report progress until `step` raises."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        step(1)
    raise AssertionError("the task was not ended")


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_each_task_runs_once_and_reports_alone(workers: int) -> None:
    ran: list[int] = []
    total, inside = 0, 0

    def advance(amount: int) -> None:
        nonlocal total, inside
        inside += 1
        assert inside == 1
        total += amount
        inside -= 1

    def run(number: int, step: Callable[[int], None]) -> None:
        for _ in range(200):
            step(number)
        ran.append(number)

    run_parallel([4, 1, 3], run, advance, workers)
    assert sorted(ran) == [1, 3, 4] and total == 1600
    run_parallel([], run, advance, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_failure_ends_the_others(workers: int) -> None:
    begun: list[int] = []
    failing = threading.Event()

    def run(number: int, step: Callable[[int], None]) -> None:
        begun.append(number)
        if number == 0:
            failing.set()
            raise ValueError("the first")
        assert failing.wait(PATIENCE)
        endless(step)

    with pytest.raises(ValueError, match="the first"):
        run_parallel([1, 0, 2, 3, 4] if workers else [0, 1], run, lambda amount: None, workers)
    assert len(begun) <= 2


def test_an_interrupt_ends_all_tasks() -> None:
    def advance(amount: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_parallel([1, 2, 3], lambda number, step: endless(step), advance, 2)


@pytest.mark.parametrize("how", ["thread", "one core", "no thread"])
def test_background_tasks_run_once(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1 if how == "one core" else 2)
    if how == "no thread":

        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", start)
    ran: list[int] = []

    def task(number: int) -> int:
        ran.append(number)
        return 10 // number

    with BackgroundTask("test") as other:
        tasks = [other.submit(task, number) for number in (5, 0, *range(1, 200))]
        with pytest.raises(ZeroDivisionError):
            tasks[1]()
        assert [task() for task in tasks[:1:-1]] == [10 // number for number in range(199, 0, -1)]
        assert tasks[0]() == tasks[0]() == 2
    assert sorted(ran) == sorted([5, *range(200)])


def test_the_caller_runs_a_task_while_the_thread_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    begun, go = threading.Event(), threading.Event()
    with BackgroundTask("test") as other:
        first = other.submit(lambda: begun.set() or go.wait(60) and threading.get_ident())
        second = other.submit(threading.get_ident)
        assert begun.wait(60) and second() == threading.get_ident()
        go.set()
        assert first() not in (False, threading.get_ident())


def test_the_with_block_finishes_tasks_and_ends_the_thread() -> None:
    done = threading.Event()
    before = threading.active_count()
    with pytest.raises(KeyError), BackgroundTask("test") as other:
        other.submit(done.set)
        raise KeyError
    assert done.is_set() and threading.active_count() == before
