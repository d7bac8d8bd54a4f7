"""Rows of windows are written back, priorities are read, and `stats` says where the ring is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf._core import slots
from fbuf._core.slots import Geometry, Ring
from fbuf.testing import assert_inplace
from tests.support.mixture import refused
from tests.support.model_cases import EXAMPLES, STEPS, cases, listed, make
from tests.support.model_windows import WindowTrial
from tests.support.refusals import raises

ENDS = ("terminated",)
WINDOWS = fbuf.Buffer(
    8,
    view=fbuf.views.Sequence(4, boundary="mask", episode_end=ENDS, autoreset="same_step"),
    sampler=fbuf.samplers.Prioritized(),
)


def rows_of(first, number, end=None):
    t = jnp.arange(first, first + number)
    return {"t": t, "carry": jnp.zeros((number, 2)), "terminated": t == (-1 if end is None else end)}


def filled():
    """Rows 0 to 5, of which row 2 ends an episode."""
    return WINDOWS.extend(WINDOWS.init(jax.tree.map(lambda x: x[0], rows_of(0, 1))), rows_of(0, 6, end=2))


def test_late_write_backs_are_refused_row_by_row():
    state = filled()
    index = WINDOWS.rows(state).index
    anchor = fbuf.Index(index.slot[:1], index.generation[:1])  # its window is rows 0, 1, 2
    rows = WINDOWS.window_index(state, anchor)
    later = WINDOWS.extend(state, rows_of(6, 4))  # in the slots of rows 0 and 1
    ones = {"carry": jnp.ones((1, 4, 2))}
    after = WINDOWS.update_rows(later, rows, ones)
    assert after.rows["carry"][:3, 0].tolist() == [0, 0, 1]
    assert int(WINDOWS.stats(after)["refused_stale"]) == 2
    after = WINDOWS.update_rows(later, WINDOWS.window_index(later, anchor), ones)  # the window is gone
    assert after.rows["carry"][:3, 0].tolist() == [0, 0, 0]
    assert int(WINDOWS.stats(after)["refused_stale"]) == 4
    waits = WINDOWS.window_index(state, fbuf.Index(index.slot[3:4], index.generation[3:4]))  # no anchor yet
    after = WINDOWS.update_rows(state, waits, ones)
    assert not after.rows["carry"].any() and int(WINDOWS.stats(after)["refused_stale"]) == 4
    wrong = fbuf.Index(jnp.array([9]), jnp.array([1], jnp.uint32))
    stats = WINDOWS.stats(WINDOWS.update_rows(later, WINDOWS.window_index(later, wrong), ones))
    assert (int(stats["refused_stale"]), int(stats["refused_out_of_range"])) == (0, 4)


def test_priorities_are_read_as_they_were_set():
    state = filled()
    read = jax.jit(WINDOWS.priorities)
    np.testing.assert_allclose(read(state), [1, 1, 1, *[np.nan] * 5], rtol=1e-5)  # rows 3 to 5 wait for their windows
    index = WINDOWS.rows(state).index
    rows = WINDOWS.window_index(state, fbuf.Index(index.slot[1:3], index.generation[1:3]))
    errors = jnp.array([[-2.0, 3.0, 9.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    state = WINDOWS.update_priority(state, rows, errors, mask=jnp.array([[True] * 4, [False] * 4]))
    np.testing.assert_allclose(read(state, index), [1, 2, 3, *[np.nan] * 5], rtol=1e-5)
    np.testing.assert_allclose(read(state, rows), [[2, 3, np.nan, np.nan], [3, *[np.nan] * 3]], rtol=1e-5)
    closed = WINDOWS.update_priority(state, index, jnp.ones(8))
    assert int(WINDOWS.stats(closed)["refused_closed"]) == 3
    one, known = jax.tree.map(lambda x: x[None], index), ~jnp.isnan(read(state, index))[None]
    stats = WINDOWS.stats(WINDOWS.update_priority(state, one, jnp.ones((1, 8)), mask=known))
    assert not any(int(stats[name]) for name in ("refused_closed", "refused_stale", "refused_out_of_range"))


def test_stats_say_where_the_ring_is():
    buffer = fbuf.Buffer(6, lanes=2)
    stats = jax.jit(buffer.stats)

    def facts(state):
        found = stats(state)
        return bool(found["is_full"]), int(found["cursor"]), int(found["writes"])

    state = buffer.init({"t": 0})
    assert facts(state) == (False, 0, 0)
    state = buffer.extend(state, {"t": jnp.zeros((2, 2), jnp.int32)})
    assert facts(state) == (False, 2, 4)
    state = buffer.extend(state, {"t": jnp.zeros((2, 2), jnp.int32)}, mask=jnp.array([[1, 1], [1, 0]], bool))
    assert facts(state) == (True, -1, 7)
    state = buffer.add(state, {"t": jnp.zeros(2, jnp.int32)}, mask=jnp.array([False, True]))
    assert facts(state) == (True, 1, 8)
    assert facts(buffer.clear(state)) == (False, 0, 12)  # each lane is at the end of its second round


@pytest.mark.parametrize(("lap", "writes"), [(2**30, 2**31 - 2), (2**31, 2**32 - 1), (2**32 - 1, 2**32 - 1)])
def test_writes_do_not_overflow(lap, writes):
    rings = Ring(jnp.array([0]), jnp.array([2]), jnp.array([lap], jnp.uint32))
    assert int(slots.head(rings, Geometry(1, 2))[1]) == writes


CALLS = st.sampled_from((*STEPS, *("update_windows",) * 6))
PROGRAMS = st.lists(st.tuples(CALLS, st.integers(0, 2**16)), min_size=1, max_size=12)
case = cases(
    listed("""sequence/batch/device/3; sequence, stride/held/compressed/-; mask, both/batch, host/compressed/3;
episode, cut/ranks, all/device/3; cross, dilation/none/device/-""")
)


@pytest.mark.more
@settings(max_examples=EXAMPLES)
@given(program=PROGRAMS)
def test_rows_of_windows_are_those_of_the_model(case, program):
    view, sampler, storage, lanes = case
    WindowTrial(make(view, sampler, storage, lanes)).run(program, given=len(view) % 2 == 0)


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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
