"""Windows in place, and many buffers at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Sequence
from tests.support.tables import checks
from tests.views.test_windows import (
    ENDS,
    EXAMPLE,
    check_chances,
    check_cuts,
    check_inplace,
    check_late_priorities,
    rows_of,
)


def test_many_buffers_at_once():
    buffer = fbuf.Buffer(40, view=Sequence(4, boundary="mask", autoreset="same_step"), sampler=Uniform("episodes"))
    every = [rows_of([3, 8, 1, 5]), rows_of([10, 2, 4, 1], 50), rows_of([1, 1, 1, 14], 100)]
    alone = [buffer.extend(buffer.init(EXAMPLE), rows) for rows in every]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *every)
    states = jax.vmap(buffer.extend)(jax.tree.map(lambda x: jnp.stack([x] * 3), buffer.init(EXAMPLE)), stacked)
    keys = jax.random.split(jax.random.key(0), 3)
    _, batches = jax.vmap(lambda s, k: buffer.sample(s, k, 6))(states, keys)
    for i, state in enumerate(alone):
        got, want = jax.tree.map(lambda x, i=i: x[i], batches), buffer.sample(state, keys[i], 6)[1]
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got, want)))


def test_nothing_to_draw():
    """Too few rows, or no episode over yet: nothing, and it is counted."""
    for view, sampler in (
        (Sequence(4, autoreset="same_step"), Uniform("episodes")),
        (Episode(9, autoreset="same_step"), Prioritized()),
        (Sequence(4, boundary="mask", autoreset="same_step"), Uniform()),
    ):
        buffer = fbuf.Buffer(20, view=view, sampler=sampler)
        rows = rows_of([3]) | {"terminated": np.zeros(3, bool)}
        state, batch = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows), jax.random.key(0), 5)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves((batch.data, batch.mask, batch.probability)))
        assert int(buffer.stats(state)["empty_samples"]) == 1 and not bool(buffer.can_sample(state))


test_checks = checks(
    (check_chances, [(Sequence(1, episode_end=ENDS, autoreset="same_step"), Uniform(over="episodes"))]),
    (check_late_priorities, [Sequence(8, autoreset="same_step"), Sequence(8, boundary="mask", autoreset="same_step")]),
    (check_cuts, [0, 4]),
)


test_optimized_checks = pytest.mark.optimized(
    checks((check_inplace, [(Episode(12, longer="cut", autoreset="same_step"), Uniform("episodes"), "extend")]))
)
