"""Views with more layouts, strategies and boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.support.tables import checks
from tests.support.trees import row_with
from tests.views.test_hindsight import drawn, follow
from tests.views.test_transition import CASES, LAYOUTS, QUICK, check_accumulated
from tests.views.test_windows import EXAMPLE, WINDOWS, check_chances, check_cuts, check_late_priorities, rows_of


@pytest.mark.parametrize(("view", "strategy", "lanes"), [("frames", "future", None)])
def test_goals_are_of_the_same_episode(view, strategy, lanes):
    follow(view, strategy, lanes, seed=0)


def test_rewards_of_whole_numbers_and_a_goal_beside_the_observation():
    count = 30
    rows = row_with(
        jnp.arange(count, dtype=jnp.float32),
        count,
        at=jnp.arange(count) // 2,
        goal=jnp.full(count, 99),
        action=jnp.arange(count),
        reward=jnp.zeros(count, jnp.int32),
    )
    view = Hindsight(
        Transition(autoreset="same_step"), lambda achieved, goal: -0.25 * (achieved != goal), "goal", "at", fraction=1.0
    )
    buffer = fbuf.Buffer(100, view=view, storage=fbuf.storages.Host(keys=("at", "goal")))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.sample(state, jax.random.key(0), 200)[1].data
    assert bool(data["relabelled"].all()) and data["goal"].dtype == jnp.int32
    reached = data["goal"] == (data["action"] + 1) // 2
    assert np.array_equal(data["reward"], np.where(reached, 0.0, -0.25)) and 0 < int(reached.sum()) < 200


def test_an_observation_that_is_the_achieved_goal():
    number = np.arange(12, dtype=np.int32)
    rows = row_with(
        number.astype(np.float32),
        12,
        final=number + np.float32(0.5),
        goal=np.full(12, -1, np.float32),
        action=number,
        terminated=number % 4 == 3,
    )
    inner = Transition(final_observation="final")
    view = Hindsight(inner, lambda achieved, goal: achieved - goal, "goal", "obs", strategy="final", fraction=1.0)
    data = drawn(view, rows, 20, 6)
    assert set(data["action"].tolist()) == set(range(12)) and data["relabelled"].all()
    assert (data["goal"] == data["action"] // 4 * 4 + 3.5).all()


REST = [(layout, case) for layout in LAYOUTS for case in CASES if (layout, case) not in QUICK]


@pytest.mark.parametrize(("layout", "case"), REST[::3])
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)


def test_episodes_of_one_row():
    rows = rows_of([2, 3, 3]) | {"terminated": np.isin(np.arange(8), (1, 4))}
    for longest in (1, 2):
        buffer = fbuf.Buffer(20, view=Episode(longest, longer="cut", autoreset="next_step"))
        state = buffer.extend(buffer.init(EXAMPLE), rows)
        ids = np.asarray(buffer.peek(state, jax.random.key(0), 100).data["id"])
        assert set(ids[:, 0].tolist()) == {0, 3, 6}


def test_leaves_keep_their_structure():
    rows = rows_of([5, 5]) | {"carry": (np.zeros((10, 2)), {"h": [np.ones(10)]})}
    buffer = fbuf.Buffer(10, view=Sequence(3, autoreset="same_step"))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.peek(state, jax.random.key(0), 4).data
    assert jax.tree.structure(data["carry"]) == jax.tree.structure(rows["carry"])
    assert data["carry"][1]["h"][0].shape == (4, 3)


def test_a_replay_takes_errors_of_windows():
    buffer = fbuf.Buffer(20, view=Sequence(4, autoreset="same_step"), sampler=Prioritized(alpha=1.0, eps=0.0))
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows_of([20]))
    index, errors = replay.sample(8).index, np.arange(1.0, 5.0, dtype=np.float32) * np.ones((8, 1), np.float32)
    replay.update_priority(index, errors, mask=np.arange(4) * np.ones((8, 1)) < 2, eta=0.5)
    assert replay.stats()["max_priority"] == 1.75  # 0.5 * 2 + 0.5 * (1 + 2) / 2


test_checks = checks(
    (check_chances, [(WINDOWS[0], Uniform(over="episodes"))]),
    (check_late_priorities, [(Sequence(5, boundary="mask", at=2, autoreset="same_step"),)]),
    (check_cuts, [(2,)]),
)
