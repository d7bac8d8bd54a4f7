"""Rows of windows in programs, in `Replay`, `checked` and `Mixture`, and after any sequence of methods."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf.testing import assert_inplace
from tests.buffer.test_window_rows import WINDOWS, rows_of
from tests.support.mixture import refused
from tests.support.model_cases import EXAMPLES, STEPS, cases, listed, make
from tests.support.model_windows import WindowTrial
from tests.support.refusals import raises

pytestmark = pytest.mark.more

CALLS = st.sampled_from((*STEPS, *("update_windows",) * 6))
PROGRAMS = st.lists(st.tuples(CALLS, st.integers(0, 2**16)), min_size=1, max_size=12)
case = cases(
    listed("""sequence/batch/device/3; sequence, stride/held/compressed/-; mask, both/batch, host/compressed/3;
episode, cut/ranks, all/device/3; cross, dilation/none/device/-""")
)


@settings(max_examples=EXAMPLES)
@given(program=PROGRAMS)
def test_rows_of_windows_are_those_of_the_model(case, program):
    view, sampler, storage, lanes = case
    WindowTrial(make(view, sampler, storage, lanes)).run(program, given=len(view) % 2 == 0)


def test_replay_writes_states_back_and_counts_late_ones():
    replay = fbuf.Replay(WINDOWS, jax.tree.map(lambda x: x[0], rows_of(0, 1)), seed=0)
    replay.extend(rows_of(0, 6, end=2))
    batch = replay.sample(16, to="numpy")
    rows = replay.window_index(batch.index)
    replay.update_rows(rows, {"carry": np.ones((16, 4, 2), np.float32)}, mask=batch.data["mask"])
    assert replay.rows().data["carry"][:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    replay.update_priority(rows, np.full((16, 4), 7, np.float32))
    np.testing.assert_allclose(replay.priorities()[:3], 7, rtol=1e-5)
    np.testing.assert_allclose(replay.priorities(batch.index), 7, rtol=1e-5)
    replay.extend(rows_of(6, 4))
    raises(ValueError, "stale", lambda: replay.update_rows(rows, {"carry": np.zeros((16, 4, 2), np.float32)}))
    assert replay.stats()["refused_stale"] > 0 == replay.stats()["refused_out_of_range"]


def test_rows_of_a_mixture_return_to_their_buffers():
    other = dataclasses.replace(WINDOWS, capacity=9)
    mixture = fbuf.Mixture({"online": WINDOWS, "offline": other}, fractions={"online": 0.5, "offline": 0.5})
    example = jax.tree.map(lambda x: x[0], rows_of(0, 1))
    state = {"online": WINDOWS.extend(WINDOWS.init(example), rows_of(0, 6, end=2))}
    state |= {"offline": other.extend(other.init(example), rows_of(100, 9))}
    state, batch = mixture.sample(state, jax.random.key(0), 32)
    rows = mixture.window_index(state, batch.index)
    mask = np.asarray(batch.data["mask"])
    np.testing.assert_array_equal(rows.source, np.where(mask, np.asarray(batch.index.source)[:, None], 2))
    carries = jnp.stack([batch.data["t"] * 1.0, jnp.ones((32, 4))], axis=-1)
    state = mixture.update_rows(state, rows, {"carry": carries}, mask=batch.data["t"] != 1)
    assert state["online"].rows["carry"][:4, 0].tolist() == [0, 0, 2, 0]
    held = state["offline"].rows
    np.testing.assert_array_equal(held["carry"][:, 0], held["t"])
    assert not refused(mixture, state)
    state = mixture.update_priority(state, rows, carries[..., 0], mask=mask & (batch.data["t"] < 102))
    known = other.priorities(state["offline"])
    np.testing.assert_allclose(known[:2], [100, 101], rtol=1e-4)
    invalid = dataclasses.replace(batch.index, source=jnp.full(32, 5))
    state = mixture.update_rows(state, mixture.window_index(state, invalid), {"carry": carries})
    assert refused(mixture, state) == {"online/refused_out_of_range": 32 * 4}
    none = jnp.zeros((32, 4), bool)
    state = mixture.update_rows(state, mixture.window_index(state, invalid), {"carry": carries}, mask=none)
    assert refused(mixture, state) == {"online/refused_out_of_range": 32 * 4}


@pytest.mark.in_place
@pytest.mark.parametrize("steps", [0, 4])
def test_a_step_that_writes_states_back_copies_nothing(steps):
    buffer = dataclasses.replace(WINDOWS, capacity=400_000)

    def step(state, given):
        key, rows, carries, errors = given
        state, batch = buffer.sample(state, key, 8)
        index = buffer.window_index(state, batch.index)
        state = buffer.update_rows(state, index, {"carry": carries})
        known = ~jnp.isnan(buffer.priorities(state, index))
        return buffer.extend(buffer.update_priority(state, index, errors, mask=known), rows), buffer.stats(state)

    shape = jax.ShapeDtypeStruct
    given = (shape((2,), jnp.uint32), jax.eval_shape(lambda: rows_of(0, 3)), shape((8, 4, 2), jnp.float32))
    given = (*given, shape((8, 4), jnp.float32))
    state = jax.eval_shape(buffer.init, jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], rows_of(0, 1))))
    if steps:
        many = jax.tree.map(lambda x: shape((steps, *x.shape), x.dtype), given)
        assert_inplace(lambda state, given: lax.scan(step, state, given), state, many)
    else:
        assert_inplace(step, state, given)
