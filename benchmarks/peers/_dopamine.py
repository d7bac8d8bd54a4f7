"""dopamine's JAX-era replay: objects in an ordered dict, numpy trees."""

from __future__ import annotations

from typing import Any

import numpy as np
from dopamine.jax.replay_memory.accumulator import TransitionAccumulator
from dopamine.jax.replay_memory.elements import TransitionElement
from dopamine.jax.replay_memory.replay_buffer import ReplayBuffer
from dopamine.jax.replay_memory.samplers import PrioritizedSamplingDistribution, UniformSamplingDistribution

from benchmarks.peers import ALPHA, BETA, Rows, Thunk


class Uniform:
    """`ReplayBuffer` without compression; one-step transitions, no stack."""

    def __init__(self, capacity: int, example: Any, sampling: Any = None, **options: Any):
        self.buffer = ReplayBuffer(
            TransitionAccumulator(stack_size=1, update_horizon=1, gamma=0.99),
            UniformSamplingDistribution(0) if sampling is None else sampling,
            batch_size=32,
            max_capacity=capacity,
            compress=False,
        )
        self.options = options

    def writer(self, rows: Rows) -> Thunk:
        def write() -> None:
            for obs, action, reward, terminated in zip(
                rows["obs"], rows["action"], rows["reward"], rows["terminated"], strict=True
            ):
                # Copied, as an environment's array is its own.
                self.buffer.add(
                    TransitionElement(np.array(obs), int(action), float(reward), bool(terminated)), **self.options
                )

        return write

    def sampler(self, batch_size: int) -> Thunk:
        return lambda: self.buffer.sample(batch_size)

    def stepper(self, batch_size: int) -> Thunk:
        def step() -> Any:
            batch, drawn = self.buffer.sample(batch_size, with_sample_metadata=True)
            weight = drawn.probabilities**-BETA
            self.buffer.update(drawn.keys, priorities=np.abs(batch.reward - 1))
            return batch, weight / weight.max()

        return step


def Prioritized(capacity: int, example: Any) -> Uniform:
    """The same with `PrioritizedSamplingDistribution`; it asks for a priority with every row."""
    # One more, for it adds a row before it removes the oldest: a tree of a power of two overflows otherwise.
    sampling = PrioritizedSamplingDistribution(0, priority_exponent=ALPHA, max_capacity=capacity + 1)
    return Uniform(capacity, example, sampling, priority=1.0)
