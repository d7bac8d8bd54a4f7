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


def drawn(view: Hindsight, rows: dict[str, Any], capacity: int, first: int) -> Any:
    """512 transitions after the first rows came, and then the others."""
    buffer = fbuf.Buffer(capacity, view=view)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)

    @jax.jit
    def run(rows: Any) -> Any:
        state = buffer.extend(buffer.init(example), jax.tree.map(lambda x: x[:first], rows))
        state = buffer.extend(state, jax.tree.map(lambda x: x[first:], rows))
        return buffer.peek(state, jax.random.key(0), 512).data

    return jax.device_get(run(rows))


def test_an_observation_that_is_the_achieved_goal() -> None:
    """The true final observation counts as for goals below it."""
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


def test_final_goals_over_the_end_of_the_ring() -> None:
    """Rows after the last end of a full ring belong to no earlier episode (torchrl gave them its goal)."""
    view = Hindsight(Transition(), lambda achieved, goal: achieved - goal, strategy="final", fraction=1.0)
    number = np.arange(14, dtype=np.int32)
    rows = {
        "obs": {"desired_goal": np.full(14, -1, np.float32), "achieved_goal": number.astype(np.float32)},
        "action": number,
        "reward": np.zeros(14, np.float32),
        "terminated": number == 8,
        "truncated": np.zeros(14, bool),
    }
    data = drawn(view, rows, 10, 8)
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
    state = buffer.init(example)
    for i in range(0, 200, 5):
        rows = jax.tree.map(lambda x: np.zeros((5, *x.shape), x.dtype), example)
        rows["obs"]["achieved_goal"] = np.arange(i, i + 5, dtype=np.float32)
        state = buffer.extend(state, rows)
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
