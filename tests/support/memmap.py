"""Buffers whose rows lie in files, and rows for them."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Compressed, Memmap, Zstd
from fbuf.views import Row, Transition
from tests.support.trees import example_of

STORAGES = {"memmap": Memmap, "files": partial(Compressed, codec=Zstd(chunk=4))}
PLAIN: dict[str, Any] = {"view": Row(), "sampler": Uniform()}
TRANSITION = Transition(n_step=2, stack=3, observation="obs", autoreset="same_step")


def rows_of(first: int, count: int, lanes: int) -> dict[str, Any]:
    t = np.arange(first, first + count)[:, None] * lanes + np.arange(lanes)
    return {
        "obs": (t[..., None, None] % 251 * np.ones((40, 40))).astype(np.uint8),
        "next": {
            "half": np.repeat(t[..., None] % 100, 3, -1).astype(jnp.bfloat16),
            "none": np.zeros((*t.shape, 0, 2), np.float32),
        },
        "action": t.astype(np.int32),
        "reward": (t / 7).astype(np.float32),
        "terminated": t % 17 == 0,
        "truncated": t % 23 == 0,
        "small": np.repeat(t[..., None] % 8, 2, -1).astype(jnp.float8_e4m3fn),
    }


EXAMPLE = example_of(rows_of(0, 1, 1))


def make(storage: str, path: Any, capacity: int = 24, **settings: Any) -> fbuf.Buffer:
    parts: dict[str, Any] = {"view": TRANSITION, "sampler": Prioritized(), "lanes": 2} | settings
    return fbuf.Buffer(capacity, storage=STORAGES[storage](path=str(path)), **parts)
