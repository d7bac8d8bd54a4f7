"""Views with more layouts, strategies and boundaries, and the structure of rows in batches."""

import collections
from typing import Any

import chex
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

pytestmark = pytest.mark.more


def test_goals_are_of_the_same_episode():
    follow("frames", "future", None, seed=0)


def test_rewards_of_whole_numbers_and_a_goal_beside_the_observation():
    count = 30
    goals = {"at": jnp.arange(count) // 2, "goal": jnp.full(count, 99), "reward": jnp.zeros(count, jnp.int32)}
    rows = row_with(jnp.arange(count, dtype=jnp.float32), count, action=jnp.arange(count), **goals)
    inner = Transition(autoreset="same_step")
    view = Hindsight(inner, lambda achieved, goal: -0.25 * (achieved != goal), "goal", "at", fraction=1.0)
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


CHANCES = [(WINDOWS[i], Uniform(over="episodes")) for i in (0, 2)] + [(WINDOWS[i], Uniform()) for i in (1, 3, 4)]
test_checks = checks((check_chances, CHANCES))


KEY = jax.random.key(0)
Info = collections.namedtuple("Info", "step mask")
Step = collections.namedtuple("Step", "obs action reward terminated info")


@chex.dataclass(frozen=True)
class ChexStep:
    obs: Any
    done: Any


def steps(n):
    number = np.arange(n, dtype=np.int32)
    obs, zeros = np.stack([number, -number], 1).astype(np.float32), np.zeros(n, bool)
    return Step(obs, number % 3, number.astype(np.float32), zeros, Info(number, zeros))


def batch_of(view, rows, **options):
    buffer = fbuf.Buffer(20, view=view, **options)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    return jax.tree.map(np.asarray, buffer.peek(buffer.extend(state, rows), KEY, 5).data)


def test_transitions_keep_the_structure_of_the_leaves_they_pass_on():
    view = fbuf.views.Transition(truncated=None, autoreset="same_step")
    data = batch_of(view, steps(12))
    assert set(data) == {"obs", "action", "reward", "discount", "next_obs", "terminated", "info"}
    assert isinstance(data["info"], Info) and data["info"].step.shape == (5,)
    inner = {"now": steps(12)._asdict(), "terminated": np.zeros(12, bool)}
    names = {name: f"now/{name}" for name in ("reward", "action")}
    view = fbuf.views.Transition(observation="now/obs", truncated=None, autoreset="same_step", **names)
    data = batch_of(view, inner)
    assert set(data["now"]) == {"terminated", "info"} and data["now"]["info"]["step"].shape == (5,)


def test_any_pytree_is_an_observation():
    rows = steps(12)._asdict() | {"obs": {0: np.zeros(12), 1: ChexStep(obs=np.zeros((12, 2)), done=np.zeros(12))}}
    rows |= {"info": jax.tree_util.Partial(max, np.zeros(12))}  # of a class whose leaves have no names
    data = batch_of(fbuf.views.Transition(truncated=None, autoreset="same_step"), rows)
    assert data["next_obs"][1].obs.shape == (5, 2) and data["info"].args[0].shape == (5,)


def test_transforms_see_the_rows_of_a_view_that_adds_nothing():
    rows = {"x": np.arange(12, dtype=np.float32), "mask": np.zeros(12, bool)}
    center = fbuf.transforms.Normalize("x")
    view = fbuf.views.Sequence(4, episode_end=())
    data = batch_of(view, rows, on_read=center)
    assert not data["mask"].any() and data["x"].all()  # the row's own `mask` hides nothing
    doubled = fbuf.transforms.Map(lambda window: window._replace(reward=2 * window.reward))
    found, plain = (batch_of(view, steps(12), on_read=f).reward for f in (doubled, None))
    np.testing.assert_array_equal(found, 2 * plain)
    named = fbuf.transforms.Normalize("row/obs", of="obs")
    ends = fbuf.views.Sequence(4, episode_end=("terminated",), autoreset="same_step")
    assert abs(batch_of(ends, steps(12), on_read=named)["row"].obs).max() < 3
