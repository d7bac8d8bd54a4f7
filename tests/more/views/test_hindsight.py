"""More of `views.Hindsight`: other views and strategies, what is not relabelled, other leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Hindsight, Transition
from tests.views.test_hindsight import drawn, follow


@pytest.mark.parametrize(("view", "strategy", "lanes"), [("frames", "future", None)])
def test_goals_are_of_the_same_episode(view, strategy, lanes):
    follow(view, strategy, lanes, seed=0)


def test_rewards_of_whole_numbers_and_a_goal_beside_the_observation():
    count = 30
    rows = {
        "obs": jnp.arange(count, dtype=jnp.float32),
        "at": jnp.arange(count) // 2,
        "goal": jnp.full(count, 99),
        "action": jnp.arange(count),
        "reward": jnp.zeros(count, jnp.int32),
        "terminated": jnp.zeros(count, bool),
        "truncated": jnp.zeros(count, bool),
    }
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
    rows = {
        "obs": number.astype(np.float32),
        "final": number + np.float32(0.5),
        "goal": np.full(12, -1, np.float32),
        "action": number,
        "reward": np.zeros(12, np.float32),
        "terminated": number % 4 == 3,
        "truncated": np.zeros(12, bool),
    }
    inner = Transition(final_observation="final")
    view = Hindsight(inner, lambda achieved, goal: achieved - goal, "goal", "obs", strategy="final", fraction=1.0)
    data = drawn(view, rows, 20, 6)
    assert set(data["action"].tolist()) == set(range(12)) and data["relabelled"].all()
    assert (data["goal"] == data["action"] // 4 * 4 + 3.5).all()
