"""`Batches`: one iteration of a `Loader`, and what it takes to hand a batch from one thread and stream to another.

On a GPU a batch that JAX made and torch reads is held until torch's stream is through with it: JAX hands out memory again
as soon as nobody names it, whatever work torch has queued.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fbuf._concurrency.prefetcher import Prefetch
from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._core.sample import Sample


class Drawn(NamedTuple):
    """A batch that waits to be handed out."""

    out: Any
    batch: Sample  # the tensors it was made from, whose memory must last
    ready: Any


class Batches:
    """One iteration of a `Loader`: an iterator that can be closed.

    Args:
      draw: Return one batch; called with a `Stop` by the thread.
      left: The loader's batches that no iteration has handed out; `close` returns prefetched ones to it.
      check_process: Raise in a process other than the loader's.
      steps: Batches of the iteration; None: no end.
      prefetch: Batches drawn ahead by a thread; 0: none.
    """

    def __init__(
        self,
        draw: Callable[..., Drawn],
        left: deque[Drawn],
        check_process: Callable[[], None],
        steps: int | None,
        prefetch: int,
    ) -> None:
        self._draw, self._left, self._check_process, self._steps = draw, left, check_process, steps
        self._taken, self._closed = 0, False
        self._counting = threading.Lock()  # of `_taken`, by threads that share the iterator
        self._held: deque[tuple[Any, Drawn]] = deque()  # on GPUs: torch's stream reads them until an event
        self._last: Drawn | None = None
        self._ahead: Prefetch | None = None
        if prefetch and (steps is None or steps > 0):
            ready = [left.popleft() for _ in range(min(len(left), steps or len(left)))]
            self._ahead = Prefetch(self, "fbuf.torch.Loader", draw, prefetch, number=steps, ready=ready)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self._release()
        ahead = self._ahead  # before `_closed`: who closes sets that first
        if self._closed or not self._may_take(drawing=ahead is None):
            self.close()
            raise StopIteration
        self._check_process()
        try:
            drawn = self._next() if ahead is None else ahead.take()
        except ReplayClosed:
            self._closed = True
            raise StopIteration from None
        except BaseException:
            self._closed = True
            raise
        if ahead is not None:
            with self._counting:
                self._taken += 1
        if drawn.ready is not None:
            _wait(drawn)
            self._last = drawn
        return drawn.out

    def _may_take(self, drawing: bool) -> bool:
        """Whether there is one more; counts it where it is drawn now, as nothing else says when it was the last."""
        with self._counting:
            more = self._steps is None or self._taken < self._steps
            self._taken += drawing and more
        return more

    def _next(self) -> Drawn:
        """One that was drawn ahead and left over, or one drawn now."""
        try:
            return self._left.popleft()
        except IndexError:
            return self._draw()

    def close(self) -> None:
        """Ends the thread. What was drawn and not handed out is for the next iteration.

        Raises:
          BaseException: an error of the thread that nobody has seen yet.
        """
        self._closed = True
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.hear()
            self._left.extend(ahead.end())
            ahead.check()

    def _release(self) -> None:
        """Holds the last batch until torch's stream has read it, and lets go of those it has."""
        if self._last is not None:
            import torch

            done = torch.cuda.Event()
            done.record()
            self._held.append((done, self._last))
            self._last = None
        while self._held and self._held[0][0].query():
            self._held.popleft()


def mark(torch: Any, batch: Sample) -> Any:
    """An event behind what this thread has queued for tensors on a GPU; None without one."""
    devices = {x.device for x in jax.tree.leaves(batch) if isinstance(x, torch.Tensor) and x.is_cuda}
    if not devices:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(devices.pop()))
    return event


def _wait(drawn: Drawn) -> None:
    """Lets the caller's stream wait for a batch that another made."""
    import torch

    stream = torch.cuda.current_stream()
    stream.wait_event(drawn.ready)
    values = drawn.out.values(True, True) if hasattr(drawn.out, "batch_size") else jax.tree.leaves(drawn.out)
    for leaf in [*values, *jax.tree.leaves(drawn.batch)]:
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
