"""Brax's uniform queue. It has no priorities, and keeps a row as one vector of one dtype."""

from __future__ import annotations

from typing import Any

import jax
from brax.training.replay_buffers import UniformSamplingQueue

from benchmarks.peers import Rows, Thunk
from benchmarks.peers._jax import Carried


class Uniform:
    """`UniformSamplingQueue`; the batch size is a setting of the queue, not of its state."""

    def __init__(self, capacity: int, example: Any):
        self.make = lambda batch_size: UniformSamplingQueue(capacity, example, batch_size)
        self.carried = Carried(self.make(1).init(jax.random.key(0)))

    def writer(self, rows: Rows) -> Thunk:
        return self.carried.write(self.make(1).insert_internal, rows)  # `insert` also counts rows in Python

    def sampler(self, batch_size: int) -> Thunk:
        queue = self.make(batch_size)
        return self.carried.draw(lambda state, key: queue.sample_internal(state))
