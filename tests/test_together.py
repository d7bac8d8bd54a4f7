"""Several tasks at a time: all run, one after another reports, and the first that fails ends the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fbuf._host.together import together


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_each_runs_once_and_reports_in_turn(workers: int) -> None:
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

    together([4, 1, 3], run, advance, workers)
    assert sorted(ran) == [1, 3, 4] and total == 1600
    together([], run, advance, workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_failure_ends_the_others(workers: int) -> None:
    begun: list[int] = []
    waiting = threading.Event()

    def run(number: int, step: Callable[[int], None]) -> None:
        begun.append(number)
        if number == 0:
            waiting.set()
            raise ValueError("the first")
        assert waiting.wait(10)
        until = time.monotonic() + 20
        while time.monotonic() < until:  # ended by `step`
            step(1)
        raise AssertionError("nobody ended it")

    since = time.monotonic()
    with pytest.raises(ValueError, match="the first"):
        together([1, 0, 2, 3, 4] if workers else [0, 1], run, lambda amount: None, workers)
    assert len(begun) <= 2 and time.monotonic() - since < 15


def test_an_interrupt_ends_all() -> None:
    def advance(amount: int) -> None:
        raise KeyboardInterrupt

    def run(number: int, step: Callable[[int], None]) -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            step(1)

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        together([1, 2, 3], run, advance, 2)
    assert time.monotonic() - begun < 15
