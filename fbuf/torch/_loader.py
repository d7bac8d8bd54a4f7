"""`Loader`: batches for a torch learner, prefetched by one thread, on the learner's device.

It is registered as a `torch.utils.data.IterableDataset`, not derived, so that importing fbuf does not import torch. Use it
directly or in a `DataLoader(loader, batch_size=None)`. Worker processes are refused: a buffer's state exists in one process,
and a forked JAX may hang. On a GPU a batch is kept until torch's stream has read it, since JAX reuses unreferenced memory
whatever work torch has queued.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import jax
import numpy as np

from fbuf._buffer.state import BufferState
from fbuf._concurrency.prefetcher import Prefetch
from fbuf._concurrency.wakeup import ReplayClosed, StopToken
from fbuf._core.arguments import DrawOptions, check_choice, did_you_mean
from fbuf._core.sample import Sample
from fbuf.torch._dtypes import import_torch
from fbuf.torch._tensordict import to_tensordict
from fbuf.torch._to_torch import sample_to_torch


class LoaderOptions(DrawOptions, total=False):
    """Options of draws, and with `epochs` those of `Replay.epoch`, for type checkers."""

    shuffle: bool
    drop_last: bool


class Drawn(NamedTuple):
    """A batch that is ready to be returned."""

    out: Any
    batch: Sample  # the tensors it was made from, whose memory must last
    ready: Any


class Batches:
    """One iteration of a `Loader`: an iterator that can be closed.

    Its thread calls `loader._draw` with a `StopToken`. `close` returns prefetched batches to `loader._left`, unless they are
    of an epoch.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader, self._steps, self._left, self._draw = loader, loader.steps, loader._left, loader._draw
        if loader.epochs is not None:
            epoch = loader._epoch()
            self._steps, self._left = loader.epochs * len(epoch), deque[Drawn]()
            self._draw = partial(loader._draw, batches=itertools.chain.from_iterable(itertools.repeat(epoch)))
        self._taken, self._closed = 0, False
        self._count_lock = threading.Lock()  # guards `_taken` if threads share the iterator
        self._in_use: deque[tuple[Any, Drawn]] = deque()  # on GPUs: torch's stream reads them until an event
        self._last: Drawn | None = None
        self._prefetch: Prefetch | None = None
        steps, left = self._steps, self._left
        if loader.prefetch and (steps is None or steps > 0):
            ready = [left.popleft() for _ in range(min(len(left), steps or len(left)))]
            self._prefetch = Prefetch(self, "fbuf.torch.Loader", self._draw, loader.prefetch, number=steps, ready=ready)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        self._release()
        prefetch = self._prefetch  # read before `_closed`, which `close` sets first
        if self._closed or not self._may_take(drawing=prefetch is None):
            self.close()
            raise StopIteration
        self._loader._check_process()
        try:
            drawn = self._next() if prefetch is None else prefetch.take()
        except ReplayClosed:
            self._closed = True
            raise StopIteration from None
        except BaseException:
            self._closed = True
            raise
        if prefetch is not None:
            with self._count_lock:
                self._taken += 1
        if drawn.ready is not None:
            self._wait(drawn)
        return drawn.out

    def _wait(self, drawn: Drawn) -> None:
        """Let the caller's stream wait for a batch that another stream made."""
        import torch

        stream = torch.cuda.current_stream()
        stream.wait_event(drawn.ready)
        values = drawn.out.values(True, True) if hasattr(drawn.out, "batch_size") else jax.tree.leaves(drawn.out)
        for leaf in [*values, *jax.tree.leaves(drawn.batch)]:
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)
        self._last = drawn

    def _may_take(self, drawing: bool) -> bool:
        """Return whether the iteration has another batch; count it if it is drawn now."""
        with self._count_lock:
            more = self._steps is None or self._taken < self._steps
            self._taken += drawing and more
        return more

    def _next(self) -> Drawn:
        """Return a batch left by an earlier iteration, or draw one."""
        try:
            return self._left.popleft()
        except IndexError:
            return self._draw()

    def close(self) -> None:
        """End the thread. The next iteration returns the batches that were prefetched but not returned.

        Raises:
          BaseException: an error of the thread that was not raised yet.
        """
        self._closed = True
        if self._prefetch is not None:
            prefetch, self._prefetch = self._prefetch, None
            prefetch.hear()
            self._left.extend(prefetch.end())
            prefetch.check()

    def _release(self) -> None:
        """Keep the last batch until torch's stream has read it; drop those it has."""
        if self._last is not None:
            import torch

            done = torch.cuda.Event()
            done.record()
            self._in_use.append((done, self._last))
            self._last = None
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()


_WORKER = (
    "; expected DataLoader(loader, batch_size=None, num_workers=0), since the buffer exists in one process. The loader "
    "prefetches by a thread: prefetch=2."
)


class Loader:
    """Iterate over batches of a `Replay`, or of a buffer and its state, as tensors.

    Args:
      source: A `Replay`, which other threads may extend and close (which ends the iteration); or a `Buffer` with `state=`,
        such as a data set's.
      batch_size: B; None: the buffer's.
      steps: Batches of one iteration; None: no end.
      epochs: Instead of `steps`: epochs of one iteration (`Replay.epoch`), over the rows that can be sampled when it begins.
      prefetch: Batches that a thread prefetches; 0: draw on request. Prefetched batches show the rows and priorities of
        their draw. `update_priority` skips indices that have become stale, and `stats` counts them.
      to: "torch": a `Sample` of tensors; "tensordict": the result of `to_tensordict`.
      device: Device of the tensors by torch's name ("cuda"); None: where JAX has the arrays.
      pin: Whether to put CPU tensors into pinned memory, so that a GPU copies while the learner computes; None: if
        `device` is a GPU.
      transform: Called in the thread with each batch; its result is returned.
      state: The state of a `Buffer`. The loader updates its own copy (`loader.state`).
      seed: Of the draws from a `Buffer`. The i-th batch does not depend on `prefetch`.
      options: As for `sample`: `beta=0.6`; with `epochs` as for `Replay.epoch`: `shuffle`, `drop_last`.
    Raises:
      ImportError: torch (or tensordict) is missing.
      TypeError, ValueError: an invalid argument. From the iterator: errors of `sample` and `transform`, or an empty buffer.
      RuntimeError: in a worker process of a DataLoader, or after a fork.

    The next iteration first returns batches left by one that was cut short, so that `samplers.Epoch` misses no row; with
    `epochs` it begins again. Iterators of one loader share its draws. Threads may share an iterator: together they get `steps`
    batches. On a GPU use `x.clone()` to keep a tensor beyond the next batch. A `DataLoader` unpacks tensordicts; with
    `to="tensordict"` pass `collate_fn=lambda batch: batch`.

    Example:
      >>> import fbuf, numpy as np, torch
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32)})
      >>> index = replay.extend({"obs": torch.ones(10, 3)})
      >>> for batch in Loader(replay, 4, steps=2):
      ...     replay.update_priority(batch.index, batch.data["obs"].sum(1))
      >>> loader = torch.utils.data.DataLoader(Loader(replay, 4, steps=2), batch_size=None)
      >>> [tuple(batch.data["obs"].shape) for batch in loader]
      [(4, 3), (4, 3)]
      >>> loader = torch.utils.data.DataLoader(Loader(replay, 4, epochs=1), batch_size=None)
      >>> len(loader), [len(batch.mask) for batch in loader]
      (3, [4, 4, 2])
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        prefetch: int = 2,
        to: Literal["torch", "tensordict"] = "torch",
        device: Any = None,
        pin: bool | None = None,
        transform: Callable[[Any], Any] | None = None,
        state: BufferState | None = None,
        seed: int = 0,
        **options: Unpack[LoaderOptions],
    ) -> None:
        torch = import_torch("Loader")
        _check(source, state, steps, epochs, prefetch, to, options)
        self.batch_size, self.steps, self.epochs, self.prefetch, self.to = batch_size, steps, epochs, prefetch, to
        self.transform, self.options = transform, options
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError) as error:
            expected = 'expected one of torch\'s. Write device="cuda", or "cpu".'
            raise ValueError(f"Loader: device is {device!r}; {expected}") from error
        on_gpu = self.device is not None and self.device.type == "cuda"
        if (on_gpu or pin) and not torch.cuda.is_available():
            raise ValueError(f"Loader: device is {device!r} and pin {pin!r}, but torch finds no GPU. Leave both out.")
        self.pin = on_gpu if pin is None else pin
        self._source, self._state, self._key = source, state, jax.random.key(seed)
        self._lock, self._left, self._process = threading.Lock(), deque[Drawn](), os.getpid()
        self._copies: Any = None  # the stream for copies to a GPU
        if prefetch and state is None:
            source._expect_stale()
        torch.utils.data.IterableDataset.register(Loader)
        torch.utils.data._utils.collate.default_collate_fn_map.setdefault(Sample, _refuse_collating)

    @property
    def state(self) -> BufferState:
        """The state after all draws of a loader over a `Buffer`, those prefetched included."""
        if self._state is None:
            raise AttributeError("Loader: it has no state, since it draws from a Replay. Use replay.state.")
        return self._state

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        return Batches(self)

    def __len__(self) -> int:
        if self.epochs is not None:
            return self.epochs * len(self._epoch())
        if self.steps is None:
            raise TypeError("Loader: steps is None, so it has no length. Write Loader(..., steps=1000), or epochs=1.")
        return self.steps

    def _epoch(self) -> Any:
        return self._source.epoch(self.batch_size, to="torch", **self.options)

    def __repr__(self) -> str:
        length = f"steps={self.steps}" if self.epochs is None else f"epochs={self.epochs}"
        return f"Loader({self._source!r}, batch_size={self.batch_size}, {length}, prefetch={self.prefetch})"

    def __reduce__(self) -> Any:
        raise TypeError("Loader: it cannot be sent to another process" + _WORKER)

    def _check_process(self) -> None:
        import torch

        if torch.utils.data.get_worker_info() is not None or os.getpid() != self._process:
            raise RuntimeError("Loader: this is a worker process" + _WORKER)

    def _draw(self, stop: StopToken | None = None, batches: Iterator[Sample] | None = None) -> Drawn:
        """Draw and convert the next batch, of an epoch if `batches` are given."""
        import torch

        if batches is None:
            batch = self._sample(stop)
        else:
            with self._lock:
                batch = next(batches)
        view = getattr(self._source, "buffer", self._source).view
        if self._copies is None and self.device is not None and self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copies):  # None: the one there is
            if self.device is not None or self.pin:
                batch = jax.tree.map(lambda x: self._placed(x) if isinstance(x, torch.Tensor) else x, batch)
            out: Any = to_tensordict(batch, view) if self.to == "tensordict" else batch
            out = out if self.transform is None else self.transform(out)
            devices = {x.device for x in jax.tree.leaves(batch) if isinstance(x, torch.Tensor) and x.is_cuda}
            ready = torch.cuda.current_stream(devices.pop()).record_event() if devices else None
            return Drawn(out, batch, ready)

    def _sample(self, stop: StopToken | None) -> Sample:
        """Draw a batch; a replay's limit may block until `stop` is set."""
        if self._state is None:
            return self._source._sample("Loader", self.batch_size, self.options, None, stop, "torch")
        with self._lock:
            self._key, key = jax.random.split(self._key)
            self._state, drawn = self._source.sample(self._state, key, self.batch_size, **self.options)
        if not np.asarray(drawn.mask).any():
            raise ValueError("Loader: no row can be sampled. Add rows, or ask buffer.can_sample(state) first.")
        return sample_to_torch(drawn)

    def _placed(self, tensor: Any) -> Any:
        if self.pin and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=True)


def _refuse_collating(batch: Any, **_: Any) -> Any:
    """Raise TypeError, where a `DataLoader` would collate batches."""
    raise TypeError("Loader: the DataLoader would batch the batches. Write DataLoader(loader, batch_size=None).")


def _check(source: Any, state: Any, steps: Any, epochs: Any, prefetch: Any, to: Any, options: Any) -> None:
    if not hasattr(source, "sample"):
        raise TypeError(f"Loader: source is {type(source).__name__}; expected a Replay or a Buffer.")
    if type(source).__name__ == "Mixture":
        raise TypeError("Loader: source is Mixture; expected a Replay or a Buffer. Use fbuf.torch.to_torch.")
    if (state is None) is not hasattr(source, "buffer"):
        what = "a Buffer without state" if state is None else "a Replay, which has its own state, and state"
        raise TypeError(f"Loader: got {what}; expected Loader(replay, 256), or Loader(buffer, 256, state=state).")
    if state is not None and not isinstance(state, BufferState):
        raise TypeError(f"Loader: state is {type(state).__name__}; expected a BufferState, as `init` returns it.")
    for name, value in (("steps", steps), ("epochs", epochs), ("prefetch", prefetch)):
        may_be_none = name != "prefetch"
        if not (may_be_none and value is None) and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"Loader: {name} is {value!r}; expected an int >= 0{', or None' * may_be_none}.")
    if epochs is not None and steps is not None:
        raise ValueError(f"Loader: steps is {steps} and epochs is {epochs}; expected at most one. Leave steps out.")
    if epochs is not None and state is not None:
        raise TypeError(
            "Loader: epochs needs a Replay, but source is a Buffer. Write replay = fbuf.Replay(buffer, row); replay.state = "
            "state (of a data set: fbuf.Replay(buffer, state))."
        )
    check_choice("Loader", "to", to, ("torch", "tensordict"))
    sampler = getattr(source, "buffer", source).sampler
    allowed, of = (tuple(sampler.options), repr(sampler)) if epochs is None else (("shuffle", "drop_last"), "an epoch")
    for name in options:
        if name not in allowed:
            known = ", ".join(allowed) or "none"
            keywords = inspect.signature(Loader).parameters
            hint = did_you_mean(name, (*allowed, *keywords)) or " Leave it out."
            hint = " Write epochs=1." if name in ("shuffle", "drop_last") and steps is None else hint
            raise ValueError(f"Loader: {of} has no option '{name}' (it has: {known}).{hint}")
