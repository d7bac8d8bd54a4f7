"""cpprb: numpy rings, and a segment tree in C++."""

from __future__ import annotations

from typing import Any

import cpprb
import numpy as np

from benchmarks.peers import ALPHA, BETA, Rows, Thunk


def _env_dict(example: Any) -> dict[str, Any]:
    return {name: {"shape": np.shape(leaf) or 1, "dtype": np.asarray(leaf).dtype} for name, leaf in example.items()}


class Uniform:
    """`ReplayBuffer`, or the one given."""

    def __init__(self, capacity: int, example: Any, buffer: Any = None):
        self.buffer = cpprb.ReplayBuffer(capacity, _env_dict(example)) if buffer is None else buffer

    def writer(self, rows: Rows) -> Thunk:
        return lambda: self.buffer.add(**rows)

    def sampler(self, batch_size: int) -> Thunk:
        return lambda: self.buffer.sample(batch_size)

    def stepper(self, batch_size: int) -> Thunk:
        def step() -> Any:
            batch = self.buffer.sample(batch_size, beta=BETA)
            self.buffer.update_priorities(batch["indexes"], np.abs(batch["reward"].ravel() - 1))
            return batch

        return step


def Prioritized(capacity: int, example: Any) -> Uniform:
    """`PrioritizedReplayBuffer`."""
    return Uniform(capacity, example, cpprb.PrioritizedReplayBuffer(capacity, _env_dict(example), alpha=ALPHA))
