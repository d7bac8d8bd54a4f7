"""Further cases of functional: see `tests/test_functional.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.functional import (
    BUFFERS,
    KEY,
    check_arguments_unchanged,
    check_eager_equals_jitted,
    check_laps,
    filled,
    host,
    rows,
    same,
    step,
)


@pytest.mark.parametrize("name", BUFFERS)
def test_vmap_over_states(name: str) -> None:
    buffer, number = BUFFERS[name], 3
    new = [rows(3, 30 + i) for i in range(number)]
    keys = jax.random.split(KEY, number)
    single = jax.jit(functools.partial(step, buffer))
    states = [buffer.extend(filled(name), rows(1 + i % 2, i)) for i in range(number)]
    stacked, many_rows = (jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (states, new))
    after, batches = jax.jit(jax.vmap(functools.partial(step, buffer)))(stacked, keys, many_rows)
    for i in range(number):
        one = jax.tree.map(lambda x, i=i: x[i], (after, batches))
        alone = single(states[i], keys[i], new[i])
        same(one[1].index, alone[1].index)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), host(one), host(alone))


@pytest.mark.parametrize("name", ["uniform-row", "deduplicated"])
@pytest.mark.parametrize("check", [check_arguments_unchanged, check_eager_equals_jitted, check_laps])
def test_other_buffers_are_functional(check: Any, name: str) -> None:
    check(name)
