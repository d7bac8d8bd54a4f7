"""`Replay.batches`: an iterator whose thread (`fbuf._concurrency.prefetcher`) draws ahead, and hands batches to the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from fbuf._concurrency import wakeup
from fbuf._concurrency.prefetcher import Make, Prefetch
from fbuf._core.sample import Sample


class Batches:
    """Batches drawn ahead; an iterator, and a context manager. `Replay.batches` makes it.

    Several threads may take batches from it, and any may close it.
    """

    def __init__(self, draw: Make, prefetch: int, timeout: float | None, explain: Callable[[], str]):
        self._timeout, self._explain = timeout, explain
        self._process = os.getpid()
        self._ahead = Prefetch(self, "fbuf.Replay.batches", draw, prefetch)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Sample:
        """The next batch; waits for it.

        Raises:
          StopIteration: the replay was closed, and what was drawn before has been handed out; or this iterator was.
          TimeoutError: it is not there in time, and may be later.
          Exception: what went wrong with it. There are no batches after that.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "Replay.batches: this process was forked, and the thread that draws is not in it; expected the process that "
                "made the iterator. Make replay and iterator in the child."
            )
        batch: Sample | None = self._ahead.take(None if self._timeout is None else wakeup.clock() + self._timeout)
        if batch is None:
            raise TimeoutError(f"Replay.batches: no batch in {self._timeout:g} s; {self._explain()}")
        return batch

    def close(self) -> None:
        """Ends the thread, and drops what was drawn ahead. Waits for the draw that is under way. Closing twice is fine.

        Raises:
          Exception: what went wrong in the thread, if `next` has not raised it.
        """
        self._ahead.hear()
        self._ahead.end()
        self._ahead.check()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._ahead.end()

    def __repr__(self) -> str:
        ahead = self._ahead
        how = "closed" if ahead.stop.asked else "ended" if ahead.ended else f"{len(ahead)} of {ahead.room} ready"
        return f"Batches({how})"
