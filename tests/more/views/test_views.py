"""Views with more layouts, strategies and boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Uniform
from fbuf.views import Episode, Hindsight, Transition
from tests.support.tables import checks
from tests.support.trees import row_with
from tests.views.test_hindsight import follow
from tests.views.test_windows import EXAMPLE, WINDOWS, check_chances, rows_of


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


def test_episodes_of_one_row():
    rows = rows_of([2, 3, 3]) | {"terminated": np.isin(np.arange(8), (1, 4))}
    for longest in (1, 2):
        buffer = fbuf.Buffer(20, view=Episode(longest, longer="cut", autoreset="next_step"))
        state = buffer.extend(buffer.init(EXAMPLE), rows)
        ids = np.asarray(buffer.peek(state, jax.random.key(0), 100).data["id"])
        assert set(ids[:, 0].tolist()) == {0, 3, 6}


test_checks = checks((check_chances, [(WINDOWS[0], Uniform(over="episodes"))]))
