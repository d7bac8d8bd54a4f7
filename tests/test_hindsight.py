"""`views.Hindsight`: goals of the same episode and of no other, rewards to match, wherever the ring's end is."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Hindsight, Row, Sequence, Transition
from tests.support.hindsight import check_inplace, follow, reward

GOAL = np.zeros(2, np.float32)
ROWS = {
    "obs": {"achieved_goal": GOAL, "desired_goal": GOAL},
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}


def test_goals_are_of_the_same_episode() -> None:
    follow("steps", "future", 3, seed=0)


def test_an_observation_that_is_the_achieved_goal() -> None:
    """The true final observation counts as for goals below it."""
    number = jnp.arange(12)
    rows = {
        "obs": number.astype(jnp.float32),
        "final": number + 0.5,
        "goal": jnp.full(12, -1.0),
        "action": number,
        "reward": jnp.zeros(12),
        "terminated": number % 4 == 3,
        "truncated": jnp.zeros(12, bool),
    }
    inner = Transition(final_observation="final")
    view = Hindsight(inner, lambda achieved, goal: achieved - goal, "goal", "obs", strategy="final", fraction=1.0)
    buffer = fbuf.Buffer(20, view=view)
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.peek(state, jax.random.key(0), 300).data
    assert set(data["action"].tolist()) == set(range(12)) and bool(data["relabelled"].all())
    assert bool((data["goal"] == data["action"] // 4 * 4 + 3.5).all())


def test_final_goals_over_the_end_of_the_ring() -> None:
    """Rows after the last end of a full ring belong to no earlier episode (torchrl gave them its goal)."""
    view = Hindsight(Transition(), lambda achieved, goal: achieved - goal, strategy="final", fraction=1.0)
    buffer = fbuf.Buffer(10, view=view)
    number = jnp.arange(14)
    rows = {
        "obs": {"desired_goal": jnp.full(14, -1.0), "achieved_goal": number.astype(jnp.float32)},
        "action": number,
        "reward": jnp.zeros(14),
        "terminated": number == 8,
        "truncated": jnp.zeros(14, bool),
    }
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    for part in (slice(0, 8), slice(8, 14)):
        state = buffer.extend(state, jax.tree.map(lambda x, part=part: x[part], rows))
    data = buffer.peek(state, jax.random.key(0), 512).data
    goals = {(int(a), float(g)) for a, g in zip(data["action"], data["obs"]["desired_goal"], strict=True)}
    assert goals == {(t, 8.0) for t in range(4, 8)} | {(8, -1.0)} | {(t, 13.0) for t in range(9, 13)}


def test_an_episode_far_longer_than_the_ring() -> None:
    """Nothing is known of where it began; goals are of rows still held."""
    view = Hindsight(Transition(), lambda achieved, goal: achieved - goal, strategy="episode", fraction=1.0)
    buffer = fbuf.Buffer(16, view=view)
    example = {
        "obs": {"desired_goal": jnp.float32(0), "achieved_goal": jnp.float32(0)},
        "action": jnp.int32(0),
        "reward": jnp.float32(0),
        "terminated": jnp.bool_(False),
        "truncated": jnp.bool_(False),
    }
    state, extend = buffer.init(example), jax.jit(buffer.extend)
    for i in range(0, 200, 5):
        rows = jax.tree.map(lambda x: jnp.zeros((5, *x.shape), x.dtype), example)
        rows["obs"]["achieved_goal"] = jnp.arange(i, i + 5, dtype=jnp.float32)
        state = extend(state, rows)
        goals = buffer.peek(state, jax.random.key(i), 512).data["obs"]["desired_goal"]
        assert set(goals.tolist()) == set(range(max(i + 4 - 15, 0) + 1, i + 5))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Hindsight(Row(), reward), TypeError, "view is Row(); expected one of transitions"),
        (lambda: Hindsight(Sequence(3), reward), TypeError, "expected one of transitions"),
        (lambda: Hindsight(Transition, reward), TypeError, "expected one of transitions"),
        (lambda: Hindsight(Transition(), reward, goal=5), TypeError, "goal is 5; expected the name of a leaf"),
        (lambda: Hindsight(Transition(), reward, "obs", "obs"), ValueError, "goal and achieved are both 'obs'"),
        (lambda: Hindsight(Transition(), "reward"), TypeError, "Transition(reward=...)"),
        (
            lambda: Hindsight(Transition(), reward, strategy="past"),
            ValueError,
            "strategy is 'past'; expected \"future\"",
        ),
        (lambda: Hindsight(Transition(), reward, fraction=4), ValueError, "fraction is 4; expected a number in [0, 1]"),
    ],
)
def test_wrong_settings(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"desired_goal": None}, "goal is 'obs/desired_goal', but rows have"),
        ({"achieved_goal": np.zeros(3, np.float32)}, "is float32[2], but 'obs/achieved_goal' is float32[3]"),
        ({"achieved_goal": np.zeros(2, np.int32)}, "is float32[2], but 'obs/achieved_goal' is int32[2]"),
    ],
)
def test_wrong_leaves(change: Any, message: str) -> None:
    obs = {n: x for n, x in (ROWS["obs"] | change).items() if x is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        fbuf.Buffer(10, view=Hindsight(Transition(), reward)).init(ROWS | {"obs": obs})


def test_wrong_rewards() -> None:
    def init(reward: Any, rows: Any = ROWS, name: str = "reward") -> None:
        fbuf.Buffer(10, view=Hindsight(Transition(reward=name), reward)).init(rows)

    with pytest.raises(ValueError, match=r"gives float32\[2\]; expected real numbers of shape \[\]"):
        init(lambda achieved, goal: achieved - goal)
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        init(lambda achieved, goal: 0.0 if (achieved == goal).all() else -1.0)
    assert "jnp.where for if" in error.value.__notes__[-1]
    with pytest.raises(ValueError, match="'obs/reward' is part of the observation 'obs'"):
        init(reward, ROWS | {"obs": ROWS["obs"] | {"reward": 0.0}}, "obs/reward")


@pytest.mark.optimized
def test_steps_are_in_place() -> None:
    check_inplace(fbuf.storages.Device(), jit=False)
