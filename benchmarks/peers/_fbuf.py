"""fbuf, as a jitted training step has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import fbuf
from benchmarks.peers import ALPHA, BETA, Rows, Thunk
from benchmarks.peers._jax import Carried


class Uniform:
    """`fbuf.Buffer`, or the buffer given."""

    def __init__(self, capacity: int, example: Any, buffer: fbuf.Buffer | None = None):
        self.buffer = fbuf.Buffer(capacity) if buffer is None else buffer
        self.carried = Carried(self.buffer.init(example))

    def writer(self, rows: Rows) -> Thunk:
        if len(next(iter(rows.values()))) == 1:
            return self.carried.write(self.buffer.add, jax.tree.map(lambda x: x[0], rows))
        return self.carried.write(self.buffer.extend, rows)

    def sampler(self, batch_size: int) -> Thunk:
        return self.carried.draw(lambda state, key: self.buffer.sample(state, key, batch_size))

    def stepper(self, batch_size: int) -> Thunk:
        def step(state: Any, key: jax.Array) -> Any:
            state, batch = self.buffer.sample(state, key, batch_size)
            error = batch.data["reward"] - jnp.float32(1)
            return self.buffer.update_priority(state, batch.index, error), batch

        return self.carried.draw(step)


def Prioritized(capacity: int, example: Any) -> Uniform:
    """`fbuf.prioritized`."""
    return Uniform(capacity, example, fbuf.prioritized(capacity, alpha=ALPHA, beta=BETA))
