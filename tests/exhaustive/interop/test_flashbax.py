"""Priorities of flashbax's other buffers."""

from typing import Any

import pytest

pytest.importorskip("flashbax")

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.interop import from_flashbax
from tests.more.interop.test_flashbax import (  # noqa: F401
    ALPHA,
    BY_PRIORITY,
    filled,
    flashbax_allowed,
    leaves_of,
    test_priorities_are_those_of_flashbax,  # noqa: E402, F401
)


@pytest.fixture(params=[("flat", 6), ("item", 19)], ids=str)
def buffer_kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_priorities_of_windows_are_kept():
    """A view that draws the same windows takes every priority, without a warning."""
    made = BY_PRIORITY["flat"]()
    state, held = filled(2, 19, made=made)
    windows = np.flatnonzero(leaves_of(state, 2).reshape(-1) > 0)
    state = made.set_priorities(state, jnp.asarray(windows), jnp.linspace(0.1, 3.0, len(windows)))
    view, sampler = fbuf.views.Sequence(2, episode_end=()), fbuf.samplers.Prioritized(ALPHA, eps=0.0)
    buffer = fbuf.Buffer(16, lanes=2, view=view, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, ours = from_flashbax(state, buffer=buffer, priority_exponent=ALPHA)
    _, batch = buffer.sample(ours, jax.random.key(0), 256)
    t = np.asarray(batch.data["step"]["t"])[:, 0]
    theirs = leaves_of(state, 2)
    np.testing.assert_allclose(batch.probability, theirs[t // 1000, t % 1000 % 8] / theirs.sum(), rtol=2e-5)
