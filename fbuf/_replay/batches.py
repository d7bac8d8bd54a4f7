"""`Batches`: the iterator of `Replay.batches`, whose thread draws ahead. `EpochBatches`: what `Replay.epoch` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fbuf._concurrency import wakeup
from fbuf._concurrency.prefetcher import Make, Prefetch
from fbuf._core.closing import Closing
from fbuf._core.sample import Index, Sample
from fbuf._replay.outside_jit import refuse_trace


class Batches(Closing):
    """An iterator over prefetched batches, and a context manager. Made by `Replay.batches`.

    Several threads may take batches from it, and any of them may close it.
    """

    def __init__(self, draw: Make, prefetch: int, timeout: float | None, explain: Callable[[], str]):
        self._timeout, self._explain = timeout, explain
        self._process = os.getpid()
        self._ahead = Prefetch(self, "fbuf.Replay.batches", draw, prefetch)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Sample:
        """Wait for the next batch and return it.

        Raises:
          StopIteration: this iterator was closed; or the replay was, and every prefetched batch has been returned.
          TimeoutError: the batch was not ready in time. It may be later.
          Exception: the thread's error. No batches follow it.
        """
        refuse_trace("batches")
        if os.getpid() != self._process:
            raise RuntimeError(
                "Replay.batches: this process was forked, and the thread that draws is not in it. Make the replay and the "
                "iterator in the child process."
            )
        batch: Sample | None = self._ahead.take(None if self._timeout is None else wakeup.clock() + self._timeout)
        if batch is None:
            raise TimeoutError(f"Replay.batches: no batch in {self._timeout:g} s; {self._explain()}")
        return batch

    def close(self) -> None:
        """End the thread, and drop prefetched batches. Wait for the current draw. Closing twice is harmless.

        Raises:
          Exception: the thread's error, if `next` has not raised it.
        """
        self._ahead.hear()
        self._ahead.end()
        self._ahead.check()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            self._ahead.end()

    def __repr__(self) -> str:
        ahead = self._ahead
        how = "closed" if ahead.stop.asked else "ended" if ahead.ended else f"{len(ahead)} of {ahead.room} ready"
        return f"Batches({how})"


class EpochBatches:
    """Batches of the rows (windows) that could be sampled when `Replay.epoch` was called; `len` counts them.

    Each iteration draws each of these rows once, with `shuffle` in another order.
    """

    def __init__(
        self,
        index: Index,  # NumPy
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        next_key: Callable[[], jax.Array],
        read: Callable[[jax.Array, int, Index, float], Sample],
    ):
        self._index, self._batch_size, self._shuffle, self._drop_last = index, batch_size, shuffle, drop_last
        self._next_key, self._read = next_key, read

    def __len__(self) -> int:
        number = self._index.slot.size
        return number // self._batch_size if self._drop_last else -(-number // self._batch_size)

    def __iter__(self) -> Iterator[Sample]:
        refuse_trace("epoch")
        key, number, size = self._next_key(), self._index.slot.size, self._batch_size
        order: Any = np.arange(number)
        if self._shuffle:
            np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel()).shuffle(order)
        for i in range(len(self)):
            at = order[i * size : (i + 1) * size]
            yield self._read(key, i, Index(self._index.slot[at], self._index.generation[at]), 1 / number)
