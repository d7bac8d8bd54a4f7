"""Items made in a thread: the same, in order, not too many of them, and an end that is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from fbuf._host.inadvance import in_advance


def alive() -> int:
    return sum(thread.name == "fbuf-in-advance" for thread in threading.enumerate())


@pytest.mark.parametrize("number", [0, 1, 5, 100])
@pytest.mark.parametrize("depth", [1, 3])
def test_items_are_the_same(number: int, depth: int) -> None:
    assert list(in_advance(range(number), depth)) == list(range(number)) and not alive()


def test_no_more_are_made_than_may_be() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for i in range(20):
            made.append(i)
            yield i

    for taken, item in enumerate(in_advance(items(), 2), 1):
        time.sleep(0.01)
        assert item == taken - 1 and len(made) <= taken + 3, made


def test_errors_come_after_what_was_made_before_them() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk")

    got = []
    with pytest.raises(OSError, match="the disk"):
        for item in in_advance(items()):
            got.append(item)
    assert got == [1, 2] and not alive()


def test_items_that_cannot_be_begun_are_an_error() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("the disk")

    got: list[type[BaseException]] = []

    def use() -> None:
        try:
            list(in_advance(Broken()))
        except OSError as error:
            got.append(type(error))

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(10)
    assert got == [OSError] and not alive()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_who_stops_early_ends_it(error: type[BaseException] | None) -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            ended.set()

    stream = in_advance(items())
    assert next(stream) == 1
    if error is None:
        stream.close()
    else:
        with pytest.raises(error):
            stream.throw(error)
    assert ended.is_set() and not alive()


def test_making_and_using_go_on_side_by_side() -> None:
    """Each waits for the other once: in turns they would wait for ever."""
    using, making = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        making.set()
        assert using.wait(20)
        yield 2

    stream = in_advance(items())
    assert next(stream) == 1
    assert making.wait(20)
    using.set()
    assert list(stream) == [2]
