"""torchrl's `ReplayBuffer`, with its C++ trees for priorities."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np

from benchmarks.peers import ALPHA, BETA, Rows, Thunk, _torchrl_tree

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # it reports every storage it makes

try:
    TREE: str | ImportError = _torchrl_tree.ensure()
except ModuleNotFoundError:
    raise
except ImportError as error:  # uniform draws need no tree
    TREE = error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler


class Uniform:
    """`ReplayBuffer(storage=LazyTensorStorage(C))`, with the sampler given."""

    def __init__(self, capacity: int, example: Any, **options: Any):
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), **options)

    def writer(self, rows: Rows) -> Thunk:
        number = len(next(iter(rows.values())))
        tensors = TensorDict({name: torch.from_numpy(np.array(leaf)) for name, leaf in rows.items()}, [number])
        if number == 1:
            single = tensors[0]
            return lambda: self.buffer.add(single)
        return lambda: self.buffer.extend(tensors)

    def sampler(self, batch_size: int) -> Thunk:
        return lambda: self.buffer.sample(batch_size)

    def stepper(self, batch_size: int) -> Thunk:
        def step() -> Any:
            batch, drawn = self.buffer.sample(batch_size, return_info=True)
            self.buffer.update_priority(drawn["index"], (batch["reward"] - 1).abs())
            return batch, drawn

        return step


def Prioritized(capacity: int, example: Any) -> Uniform:
    """The same with `PrioritizedSampler`."""
    if isinstance(TREE, ImportError):
        raise TREE
    return Uniform(capacity, example, sampler=PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA))
