"""Run the cases of Brax, whose queue stores a row as one vector of one dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from benchmarks.defects import Outcome

EXAMPLE = {"frame": jnp.zeros(8, jnp.uint8), "reward": jnp.float32(0), "id": jnp.int32(0)}
LARGE = 2**24 + 1  # the first integer that float32 cannot represent


def dtypes() -> Outcome:
    from brax.training.replay_buffers import UniformSamplingQueue

    queue = UniformSamplingQueue(4, EXAMPLE, 2)
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), EXAMPLE | {"id": jnp.int32(LARGE)})
    state = queue.insert(queue.init(jax.random.key(0)), rows)
    _, batch = queue.sample(state)
    back, size = int(batch["id"][0]), state.data.itemsize * state.data.shape[1]
    return Outcome(f"a row of 16 bytes takes {size}; int32 {LARGE:,} is returned as {back:,}", back == LARGE)
