"""Test `run_parallel`: each task runs once, and its error reaches the caller."""

import threading
import time

import pytest

from fbuf._concurrency.parallel import run_parallel
from tests.support.refusals import raises
from tests.support.threads import PATIENCE


def endless(step):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        step(1)
    raise AssertionError("the task was not ended")


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_each_task_runs_once_and_reports_alone(workers):
    ran = []
    total, inside = 0, 0

    def advance(amount):
        nonlocal total, inside
        inside += 1
        time.sleep(0)  # lets another thread run
        assert inside == 1
        total += amount
        inside -= 1

    def run(number, step):
        for _ in range(200):
            step(number)
        ran.append(number)

    run_parallel([4, 1, 3], run, advance, workers)
    assert sorted(ran) == [1, 3, 4] and total == 1600
    run_parallel([], run, advance, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_failure_ends_the_others(workers):
    begun = []
    failing = threading.Event()

    def run(number, step):
        begun.append(number)
        if number == 0:
            failing.set()
            raise ValueError("the first")
        assert failing.wait(PATIENCE)
        endless(step)

    with pytest.raises(ValueError, match="the first"):
        run_parallel([1, 0, 2, 3, 4] if workers else [0, 1], run, lambda amount: None, workers)
    assert len(begun) <= 2


def test_an_interrupt_ends_all_tasks():
    def advance(amount):
        raise KeyboardInterrupt

    raises(KeyboardInterrupt, None, lambda: run_parallel([1, 2, 3], lambda number, step: endless(step), advance, 2))
