"""Rows for transforms one by one, and what a transform makes of them outside a buffer."""

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import transforms
from fbuf._interfaces.transform import StatefulTransform
from tests.support.trees import example_of


def negated(row):
    return {**row, "a": -row["a"]}


def rows(*lead, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(*lead, 3)).astype(np.float32),
        "b": rng.normal(size=(*lead, 2)).astype(np.float32),
        "e": rng.normal(size=(*lead, 3)).astype(np.float32),
        "frame": rng.integers(0, 256, (*lead, 6, 5)).astype(np.uint8),
        "r": rng.normal(size=lead).astype(np.float32),
    }


def memory_of(transform):
    source = transform.of if isinstance(transform, transforms.Denormalize) else transform
    if not isinstance(source, StatefulTransform):
        return None
    given = rows(7, 2, seed=9)
    return source.observe(source.init(example_of(given)), given, jnp.ones((7, 2), bool))


run = jax.jit(transforms.apply, static_argnums=0, static_argnames=("lead", "time"))


def applied(transform, data, **more):
    return run(transform, data, memory=memory_of(transform), **more)
