"""An iterator that runs ahead of who uses it, in a thread: what makes its items and what uses them take turns no longer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK = 0.05  # seconds


def in_advance(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The same items in the same order; up to `depth` of them, and one more, are made before they are asked for.

    What making them raises is raised where the next item was asked for. Closing it ends the thread, once the item it is at is
    made; `items` is then closed, by that thread, if it can be.
    """
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def put(more: bool, what: Any) -> bool:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                made.put((more, what), timeout=_LOOK)
                return True
        return False

    def run() -> None:
        error: BaseException | None = None
        source = None
        try:
            source = iter(items)
            for item in source:
                if not put(True, item):
                    break
        except BaseException as raised:
            error = raised
        finally:
            if isinstance(source, Generator):
                source.close()
            put(False, error)

    thread = threading.Thread(target=run, name="fbuf-in-advance", daemon=True)
    thread.start()
    try:
        while True:
            more, what = made.get()
            if not more:
                break
            yield what
        if what is not None:
            raise what
    finally:
        stop.set()
        thread.join()
