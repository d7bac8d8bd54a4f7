"""`Loader`: batches for a torch learner, drawn ahead by one thread, where the learner wants them.

It is an iterable data set of torch's (`isinstance(loader, torch.utils.data.IterableDataset)`), registered and not derived,
so that importing fbuf does not import torch. Used by hand or under a `DataLoader(loader, batch_size=None)`. Worker processes
are refused: a buffer's state lives in one process, a forked JAX may hang, and what they would overlap with the learner the
thread does already.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fbuf._buffer.state import BufferState
from fbuf._concurrency.wakeup import StopToken
from fbuf._core.sample import Sample
from fbuf.torch._dtypes import import_torch
from fbuf.torch._iterator import Batches, Drawn, mark
from fbuf.torch._tensordict import to_tensordict
from fbuf.torch._to_torch import sample_to_torch

_FORMS = ("torch", "tensordict")


class Loader:
    """Batches of a `Replay`, or of a buffer and its state, as tensors.

    Args:
      source: A `Replay`, which others may add to meanwhile, and close, which ends the iteration; or a `Buffer` and its
        `state=`, as of a data set.
      batch_size: B; None: the buffer's.
      steps: Batches of one iteration; None: no end.
      prefetch: Batches drawn ahead by a thread, at least 1; 0: drawn when asked for. Those drawn ahead show the rows and
        priorities of their draw. Rows of a `Replay` that is written to may be overwritten in between: `update_priority` skips
        such stale indices, and `stats` counts them.
      to: "torch": a `Sample` of tensors; "tensordict": as `to_tensordict` gives it.
      device: Where tensors go, as torch names it ("cuda"); None: where JAX has the arrays.
      pin: Whether CPU tensors are put into pinned memory, from where a GPU copies while the learner computes; None: where
        `device` is a GPU.
      transform: Called in the thread with each batch; gives what is handed out.
      state: With a `Buffer`, its state; the loader carries it on (`loader.state`), the caller's stays as it is.
      seed: With a `Buffer`, of the draws. The i-th batch does not depend on `prefetch`.
      options: As for `sample`: `beta=0.6`.
    Raises:
      ImportError: torch (or tensordict) is missing.
      TypeError, ValueError: arguments that do not fit. From the iterator: what `sample` raises; nothing is there to draw;
        an error of `transform`.
      RuntimeError: in a worker process of a DataLoader, or after a fork.

    Batches left over when an iteration is cut short are handed out first by the next one, so an epoch misses no row. Two
    iterators of one loader share its draws, and threads may share an iterator: together they get `steps` batches. On a GPU
    keep a tensor beyond the next batch as `x.clone()`: until then the loader sees to it that JAX leaves its memory alone. A
    `DataLoader` takes tensordicts apart; with `to="tensordict"` give it `collate_fn=lambda batch: batch`.

    Example:
      >>> import fbuf, numpy as np, torch
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32)})
      >>> replay.extend({"obs": torch.ones(10, 3)})
      >>> for batch in Loader(replay, 4, steps=2):
      ...     replay.update_priority(batch.index, batch.data["obs"].sum(1))
      >>> loader = torch.utils.data.DataLoader(Loader(replay, 4, steps=2), batch_size=None)
      >>> [tuple(batch.data["obs"].shape) for batch in loader]
      [(4, 3), (4, 3)]
    """

    def __init__(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        steps: int | None = None,
        prefetch: int = 2,
        to: str = "torch",
        device: Any = None,
        pin: bool | None = None,
        transform: Callable[[Any], Any] | None = None,
        state: BufferState | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        torch = import_torch("Loader")
        _check(source, state, steps, prefetch, to, options)
        self.batch_size, self.steps, self.prefetch, self.to = batch_size, steps, prefetch, to
        self.transform, self.options = transform, options
        self.device = None if device is None else _device(torch, device)
        on_gpu = self.device is not None and self.device.type == "cuda"
        if (on_gpu or pin) and not torch.cuda.is_available():
            raise ValueError(
                f"Loader: device is {device!r} and pin {pin!r}, but this torch finds no GPU. Leave out device= and pin=."
            )
        self.pin = on_gpu if pin is None else pin
        self._source, self._state, self._key = source, state, jax.random.key(seed)
        self._lock, self._left, self._process = threading.Lock(), deque[Drawn](), os.getpid()
        self._copies: Any = None  # the stream for copies to a GPU
        if prefetch and state is None:
            source.expect_stale()
        torch.utils.data.IterableDataset.register(Loader)
        torch.utils.data._utils.collate.default_collate_fn_map.setdefault(Sample, _refuse_collating)

    @property
    def state(self) -> BufferState:
        """Of a loader over a `Buffer`: the state that its draws have come to, those drawn ahead included."""
        if self._state is None:
            raise AttributeError("Loader: there is no state here, for it draws from a Replay. Use replay.state.")
        return self._state

    def __iter__(self) -> Iterator[Any]:
        self._check_process()
        return Batches(self._draw, self._left, self._check_process, self.steps, self.prefetch)

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("Loader: it has no end; expected steps. Write Loader(..., steps=1000).")
        return self.steps

    def __repr__(self) -> str:
        return f"Loader({self._source!r}, batch_size={self.batch_size}, steps={self.steps}, prefetch={self.prefetch})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "Loader: it cannot go to another process, because the buffer lives in this one; expected "
            "DataLoader(loader, batch_size=None, num_workers=0). It draws ahead by a thread of its own: prefetch=2."
        )

    def _check_process(self) -> None:
        import torch

        if torch.utils.data.get_worker_info() is not None or os.getpid() != self._process:
            raise RuntimeError(
                "Loader: this is a worker process, but the buffer lives in the one that made the loader; expected "
                "DataLoader(loader, batch_size=None, num_workers=0). It draws ahead by a thread of its own: prefetch=2."
            )

    def _draw(self, stop: StopToken | None = None) -> Drawn:
        """The next batch as it is handed out, what it lies in, and what says on a GPU that it is there."""
        import torch

        batch = self._sample(stop)
        view = getattr(self._source, "buffer", self._source).view
        if self._copies is None and self.device is not None and self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copies):  # None: the one there is
            if self.device is not None or self.pin:
                batch = jax.tree.map(lambda x: self._placed(x) if isinstance(x, torch.Tensor) else x, batch)
            out: Any = to_tensordict(batch, view) if self.to == "tensordict" else batch
            out = out if self.transform is None else self.transform(out)
            return Drawn(out, batch, mark(torch, batch))

    def _sample(self, stop: StopToken | None) -> Sample:
        """Waits for a limit of the replay until `stop` tells it not to."""
        if self._state is None:
            return sample_to_torch(self._source._sample("Loader", self.batch_size, self.options, None, stop))
        with self._lock:
            self._key, key = jax.random.split(self._key)
            self._state, drawn = self._source.sample(self._state, key, self.batch_size, **self.options)
        if not np.asarray(drawn.mask).any():
            raise ValueError("Loader: there is nothing to draw. Add rows first; buffer.can_sample(state) says when.")
        return sample_to_torch(drawn)

    def _placed(self, tensor: Any) -> Any:
        if self.pin and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=True)


def _device(torch: Any, device: Any) -> Any:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'Loader: device is {device!r}; expected one of torch\'s. Write device="cuda", or "cpu".'
        ) from error


def _refuse_collating(batch: Any, **_: Any) -> Any:
    """What a `DataLoader` calls that would put batches into batches."""
    raise TypeError(
        "Loader: the DataLoader would make batches of batches; expected none of its own. Write DataLoader(loader, "
        "batch_size=None)."
    )


def _check(source: Any, state: Any, steps: Any, prefetch: Any, to: Any, options: dict[str, Any]) -> None:
    if not hasattr(source, "sample"):
        raise TypeError(
            f"Loader: source is {type(source).__name__}; expected a Replay, or a Buffer. Write Loader(replay, 256), or "
            f"Loader(buffer, 256, state=state)."
        )
    if type(source).__name__ == "Mixture":
        raise TypeError(
            "Loader: source is Mixture; expected a Replay, or a Buffer. Draw yourself: state, batch = mixture.sample(state, "
            "key, 256), then fbuf.torch.to_torch(batch)."
        )
    if (state is None) is not hasattr(source, "buffer"):
        what = "a Buffer without state" if state is None else "a Replay, which has its own state, and state"
        raise TypeError(f"Loader: given {what}; expected Loader(replay, 256), or Loader(buffer, 256, state=state).")
    if state is not None and not isinstance(state, BufferState):
        raise TypeError(f"Loader: state is {type(state).__name__}; expected a BufferState, as `init` gives it.")
    for name, value in (("steps", steps), ("prefetch", prefetch)):
        none = name == "steps" and value is None
        if not none and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(
                f"Loader: {name} is {value!r}; expected an int, 0 or more{', or None' * (name == 'steps')}."
            )
    if to not in _FORMS:
        raise ValueError(f'Loader: to is {to!r}; expected "torch" or "tensordict".')
    sampler = getattr(source, "buffer", source).sampler
    for name in options:
        if name not in sampler.options:
            raise ValueError(
                f"Loader: {sampler!r} has no number '{name}' (it has: {', '.join(sampler.options) or 'none'}). Leave it out."
            )
