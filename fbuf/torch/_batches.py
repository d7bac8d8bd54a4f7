"""`Batches`: one iteration of a `Loader`, and what it takes to hand a batch from one thread and stream to another.

On a GPU a batch that JAX made and torch reads is held until torch's stream is through with it: JAX hands out memory again
as soon as nobody names it, whatever work torch has queued.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fbuf._closed import ReplayClosed
from fbuf._prefetch import Prefetch
from fbuf._sample import Sample

if TYPE_CHECKING:
    from fbuf.torch._loader import Loader


class Drawn(NamedTuple):
    """A batch that waits to be handed out."""

    out: Any
    batch: Sample  # the tensors it was made from, whose memory must last
    ready: Any


class Batches:
    """One iteration of a `Loader`: an iterator that can be closed. What it had drawn ahead goes back to the loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._taken, self._closed = loader, 0, False
        self._held: deque[tuple[Any, Drawn]] = deque()  # on GPUs: torch's stream reads them until an event
        self._last: Drawn | None = None
        self._ahead: Prefetch | None = None
        if loader.prefetch and (loader.steps is None or loader.steps > 0):
            ready = [loader._left.popleft() for _ in range(min(len(loader._left), loader.steps or len(loader._left)))]
            self._ahead = Prefetch(
                self, "fbuf.torch.Loader", loader._draw, loader.prefetch, number=loader.steps, ready=ready
            )

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        self._release()
        ahead = self._ahead  # before `_closed`: who closes sets that first
        if self._closed or not self._may_take(drawing=ahead is None):
            self.close()
            raise StopIteration
        loader._check_process()
        try:
            drawn = loader._next() if ahead is None else ahead.take()
        except ReplayClosed:
            self._closed = True
            raise StopIteration from None
        except BaseException:
            self._closed = True
            raise
        if ahead is not None:
            with self._loader._counting:
                self._taken += 1
        if drawn.ready is not None:
            _wait(drawn)
            self._last = drawn
        return drawn.out

    def _may_take(self, drawing: bool) -> bool:
        """Whether there is one more; counts it where it is drawn now, as nothing else says when it was the last."""
        steps = self._loader.steps
        with self._loader._counting:
            more = steps is None or self._taken < steps
            self._taken += drawing and more
        return more

    def close(self) -> None:
        """Ends the thread. What was drawn and not handed out is for the next iteration.

        Raises:
          BaseException: an error of the thread that nobody has seen yet.
        """
        self._closed = True
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            ahead.hear()
            self._loader._left.extend(ahead.end())
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
