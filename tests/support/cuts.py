"""Rows that count, and what buffers of them draw."""

import jax
import jax.numpy as jnp
import numpy as np

from fbuf.views import Sequence, Transition

ROW = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
STEPS = Transition(n_step=3, gamma=0.5, autoreset="same_step")
WINDOWS = Sequence(3, episode_end=())


def steps(first, number, **leaves):
    """Rows of a running episode; `obs` counts from `first`."""
    count = np.arange(first, first + number)
    zeros = np.zeros(number, bool)
    rows = {"obs": count.astype(np.float32), "action": count, "reward": np.ones(number, np.float32)}
    return rows | {"terminated": zeros, "truncated": zeros} | leaves


def pairs(buffer, state):
    """What can be drawn: the next observation, return and discount, by the observation."""
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 512).data)
    columns = (data[name].tolist() for name in ("obs", "next_obs", "reward", "discount"))
    return {obs: tuple(rest) for obs, *rest in zip(*columns, strict=True)}


def windows(buffer, state):
    return set(map(tuple, buffer.peek(state, jax.random.key(0), 256).data["t"].tolist()))


def counted(first, number):
    return {"t": jnp.arange(first, first + number)}
