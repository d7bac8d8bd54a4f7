"""Writers that replace any row: every storage in place; long runs."""

import itertools

import jax
import numpy as np
import pytest

from fbuf.samplers import Prioritized
from tests.more.writers.test_scattered import test_an_old_state_reads_its_own_rows_or_says_that_they_expired  # noqa: F401
from tests.support.scattered import EXAMPLE, check_inplace, make, rows_of
from tests.support.tables import checks, one_of


def test_a_hundred_thousand_rows_take_no_more_than_a_thousand():
    buffer = make("Compressed", "Anywhere", capacity=1000)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, sizes = buffer.init(EXAMPLE), []
    for i in range(500):
        state = extend(state, rows_of(200 * i, 200))
        if i % 50 == 9:
            sizes.append(buffer.nbytes(state)["host"])
    assert max(sizes) < min(sizes) + 5 * 32 * 1024  # the arena lets four segments lie idle before it moves anything


storage = one_of("Host", "Compressed")


@pytest.mark.parametrize(
    ("storage", "writer", "x64"),
    [
        ("Compressed", "Largest", True),
        ("Device", "TopK", False),
        ("Device", "TopK", True),
        ("Device", "Reservoir", True),
    ],
)
def test_strict_promotion_and_x64(storage, writer, x64):
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with jax.numpy_dtype_promotion("strict"), wide(x64), jax.debug_nans(True):
        buffer = make(storage, writer, sampler=Prioritized())
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30))
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"]})
        assert np.asarray(batch.mask).all() and np.asarray(buffer.rows(state).mask).all()
        assert len(set(np.asarray(buffer.rows(buffer.clear(state)).mask).tolist())) == 1


test_optimized_checks = pytest.mark.optimized(
    checks((check_inplace, itertools.product(["Device", "Host", "Compressed"], ["Uniform", "Prioritized"])))
)
