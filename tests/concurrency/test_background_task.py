"""A thread beside the one that asks: each task is done once, by whoever comes first, and its error comes back."""

from __future__ import annotations

import threading

import pytest

from fbuf._concurrency import parallel as background_task
from fbuf._concurrency.parallel import BackgroundTask


@pytest.mark.parametrize("how", ["beside", "one core", "no thread"])
def test_tasks_are_done_once_and_give_what_they_did(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_task, "cores", lambda: 1 if how == "one core" else 2)
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


def test_who_asks_does_not_wait_for_a_thread_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_task, "cores", lambda: 2)
    begun, go = threading.Event(), threading.Event()
    with BackgroundTask("test") as other:
        first = other.submit(lambda: begun.set() or go.wait(60) and threading.get_ident())
        second = other.submit(threading.get_ident)
        assert begun.wait(60) and second() == threading.get_ident()
        go.set()
        assert first() not in (False, threading.get_ident())


def test_the_thread_ends_with_the_block_and_a_task_that_nobody_waits_for_is_done() -> None:
    done = threading.Event()
    before = threading.active_count()
    with pytest.raises(KeyError), BackgroundTask("test") as other:
        other.submit(done.set)
        raise KeyError
    assert done.is_set() and threading.active_count() == before
