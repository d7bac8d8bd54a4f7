"""flashbax's item buffers, under the user's own jit with the state donated, as its documentation advises."""

from __future__ import annotations

import functools
from typing import Any

import flashbax
import jax
import jax.numpy as jnp

from benchmarks.peers import ALPHA, BETA, Rows, Thunk
from benchmarks.peers._jax import Carried


class Uniform:
    """`make_item_buffer`, or the maker given; the batch size is a setting of the buffer, not of its state."""

    def __init__(self, capacity: int, example: Any, make: Any = flashbax.make_item_buffer):
        self.make = functools.partial(make, capacity, 1, add_batches=False)
        self.carried = Carried(self.make(sample_batch_size=1).init(example))

    def writer(self, rows: Rows) -> Thunk:
        single = len(next(iter(rows.values()))) == 1
        buffer = self.make(sample_batch_size=1, add_sequences=not single)
        return self.carried.write(buffer.add, jax.tree.map(lambda x: x[0], rows) if single else rows)

    def sampler(self, batch_size: int) -> Thunk:
        buffer = self.make(sample_batch_size=batch_size)
        return self.carried.draw(lambda state, key: (state, buffer.sample(state, key)))

    def stepper(self, batch_size: int) -> Thunk:
        """Two calls: in one program XLA copies the whole tree, because nothing orders its reads before its writes."""
        buffer = self.make(sample_batch_size=batch_size)

        @jax.jit
        def sample(state: Any, key: jax.Array) -> Any:
            key, now = jax.random.split(key)
            batch = buffer.sample(state, now)
            weight = batch.probabilities**-BETA  # as its users write it; a factor n^-beta cancels
            priority = jnp.abs(batch.experience["reward"] - jnp.float32(1))
            return batch, weight / jnp.max(weight), priority, key

        update = jax.jit(buffer.set_priorities, donate_argnums=0)

        def step() -> Any:
            batch, weight, priority, self.carried.key = sample(self.carried.state, self.carried.key)
            self.carried.state = jax.block_until_ready(update(self.carried.state, batch.indices, priority))
            return batch, weight

        return step


def Prioritized(capacity: int, example: Any) -> Uniform:
    """`make_prioritised_item_buffer`; its update for the device that runs here."""
    device = jax.default_backend()
    make = functools.partial(flashbax.make_prioritised_item_buffer, priority_exponent=ALPHA, device=device)
    return Uniform(capacity, example, make)
