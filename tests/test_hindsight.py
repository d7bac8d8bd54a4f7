"""`views.Hindsight`: goals of the same episode and of no other, rewards to match, wherever the ring's end lies.

The oracle keeps all rows that ever came as a list a lane, and says for each that can be drawn which goals it may be given, and
whether any. Goals name the state they were achieved in, so that a wrong one is seen at once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Hindsight, Row, Sequence, Transition
from tests.inplace import assert_draw_write_draw
from tests.test_uniformity import chi_square_z

LENGTH, DRAWS = 31, 2**12
FINAL = 0.5  # added to a row's number: what its true final observation achieved


def reward(achieved: jax.Array, goal: jax.Array) -> jax.Array:
    """Tells apart any two pairs of states."""
    return achieved[0] * 1000 + goal[0] + 7 * goal[1]


VIEWS = {
    "one step": Transition(),
    "steps": Transition(n_step=3, gamma=0.5, stack=2),
    "final": Transition(n_step=2, gamma=0.5, final_observation="last"),
    "next step": Transition(n_step=2, gamma=0.5, autoreset="next_step"),
    "frames": Transition(stack=3, final_observation="last", pad="repeat"),
}


@dataclasses.dataclass
class Seen:
    """A row of the oracle."""

    lane: int
    number: int
    first: int  # number of its episode's first row
    end: bool
    terminated: bool
    reset: bool


class Oracle:
    """All rows of all lanes."""

    def __init__(self, view: Transition, lanes: int):
        self.view, self.next_step = view, view.autoreset == "next_step"
        self.lanes: list[list[Seen]] = [[] for _ in range(lanes)]

    def arrive(self, lane: int, terminated: bool, truncated: bool) -> None:
        past = self.lanes[lane]
        before = past[-1] if past else None
        reset = self.resets_next(lane)
        begins = before is None or (before.reset if self.next_step else before.end)
        number = len(past)
        first = number if begins else before.first
        past.append(Seen(lane, number, first, terminated or truncated, terminated, reset))

    def resets_next(self, lane: int) -> bool:
        """Whether the next row will hold no more than the final observation."""
        past = self.lanes[lane]
        return self.next_step and bool(past) and past[-1].end

    def last(self, row: Seen) -> int:
        """Number of the newest row of its episode."""
        return max(other.number for other in self.lanes[row.lane] if other.first == row.first)

    def newest_state(self, row: Seen) -> float:
        last = self.lanes[row.lane][self.last(row)]
        return last.number + (FINAL if last.end and self.view.final_observation is not None else 0)

    def led_to(self, row: Seen) -> float | None:
        """The state that the row's step led to, if it was stored."""
        if row.end and not self.next_step:
            return row.number + FINAL if self.view.final_observation is not None else None
        return row.number + 1 if row.number < self.last(row) else None

    def counted(self, row: Seen) -> list[Seen]:
        """Rows whose rewards make the return."""
        rows, cut = [], self.next_step or self.view.final_observation is not None
        for step in range(self.view.n_step):
            here = self.lanes[row.lane][row.number + step]
            if not here.end or here.terminated or cut:
                rows.append(here)
            if here.end:
                break
        return rows

    def goals(self, row: Seen, strategy: str) -> list[float]:
        """States that may become the goal; none: it keeps its own."""
        if any(self.led_to(here) is None for here in self.counted(row)):
            return []
        newest, oldest = self.newest_state(row), len(self.lanes[row.lane]) - LENGTH
        states = [float(n) for n in range(max(row.first, oldest) + 1, self.last(row) + 1)]
        if newest > self.last(row):
            states.append(newest)
        if strategy == "episode":
            return states
        later = [state for state in states if state > row.number]
        return later[-1:] if strategy == "final" else later

    def returned(self, row: Seen, goal: float | None, rewards: np.ndarray) -> float:
        """The n-step return."""
        total = 0.0
        for i, here in enumerate(self.counted(row)):
            own = float(rewards[here.lane, here.number])
            total += self.view.gamma**i * (own if goal is None else self.led_to(here) * 1000 + goal + 7 * row.lane)
        return total


@functools.cache
def verbs(buffer: fbuf.Buffer) -> tuple[Any, Any]:
    return (
        jax.jit(lambda s, rows, mask: buffer.extend(s, rows, mask=mask), donate_argnums=0),
        jax.jit(lambda s, key: buffer.sample(s, key, DRAWS), donate_argnums=0),
    )


def observation(number: np.ndarray, lane: np.ndarray, extra: float) -> dict[str, np.ndarray]:
    achieved = np.stack([number + extra, lane], axis=-1).astype(np.float32)
    frame = (number[..., None] % 251 + 1).astype(np.uint8)
    return {"achieved_goal": achieved, "desired_goal": -1 - achieved, "frame": frame}


def follow(view: str, strategy: str, lanes: int | None, seed: int, fraction: float = 0.7) -> None:
    """Writes rows of random episodes three times round the ring, and compares what is drawn."""
    width = lanes or 1
    buffer = fbuf.Buffer(
        LENGTH * width, lanes=lanes, view=Hindsight(VIEWS[view], reward, strategy=strategy, fraction=fraction)
    )
    oracle, rng = Oracle(VIEWS[view], width), np.random.default_rng(seed)
    extend, sample = verbs(buffer)
    rewards = rng.normal(size=(width, 500)).astype(np.float32)
    state: Any = None
    for turn in range(14):
        often = rng.choice([0.0, 0.1, 0.4])
        terminated, truncated = rng.random((2, 7, width)) < often
        mask, number = rng.random((7, width)) < rng.choice([0.6, 1.0]), np.zeros((7, width), int)
        lane = np.zeros((7, 1), int) + np.arange(width)[None, :]
        for n in range(7):
            for e in range(width):
                if not mask[n, e]:
                    continue
                number[n, e] = len(oracle.lanes[e])
                if oracle.resets_next(e):
                    terminated[n, e] = truncated[n, e] = False
                oracle.arrive(e, bool(terminated[n, e]), bool(truncated[n, e]))
        rows = {
            "obs": observation(number, lane, 0.0),
            "last": observation(number, lane, FINAL),
            "action": number.astype(np.int32),
            "reward": rewards[lane, number],
            "terminated": terminated,
            "truncated": truncated,
        }
        if state is None:
            state = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), rows))
        state = extend(state, *((rows, mask) if lanes else jax.tree.map(lambda x: x[:, 0], (rows, mask))))
        state, batch = sample(state, jax.random.key(turn))
        compare(oracle, jax.device_get(batch), strategy, fraction, rewards)


def compare(oracle: Oracle, batch: Any, strategy: str, fraction: float, rewards: np.ndarray) -> None:
    data, lanes = batch.data, len(oracle.lanes)
    assert batch.mask.all() or not batch.mask.any()
    drawn: dict[tuple[int, int], list[int]] = {}
    for i in np.flatnonzero(batch.mask):
        lane = int(batch.index.slot[i]) % lanes
        drawn.setdefault((lane, int(data["action"][i])), []).append(i)
    could, did = 0, 0
    for (lane, number), places in drawn.items():
        row = oracle.lanes[lane][number]
        goals = oracle.goals(row, strategy)
        new = data["relabelled"][places]
        assert goals or not new.any()
        could, did = could + (len(places) if goals else 0), did + int(new.sum())
        obs, next_obs = ({n: x[places] for n, x in data[name].items()} for name in ("obs", "next_obs"))
        stack = oracle.view.stack
        given = obs["desired_goal"][:, -1] if stack else obs["desired_goal"]
        if stack:  # one goal throughout, but for padding
            frames = obs["frame"][..., 0] != 0
            assert ((obs["desired_goal"] == given[:, None]).all(-1) | ~frames | ~new[:, None]).all()
        following = next_obs["desired_goal"][:, -1] if stack else next_obs["desired_goal"]
        assert (following[new] == given[new]).all()
        assert (given[~new] == [-1 - number, -1 - lane]).all()
        assert (given[new][:, 1] == lane).all() and set(given[new][:, 0].tolist()) <= set(goals)
        for goal, got, relabelled in zip(given[:, 0], data["reward"][places], new, strict=True):
            want = oracle.returned(row, float(goal) if relabelled else None, rewards)
            np.testing.assert_allclose(got, want, rtol=1e-5)
        if len(goals) > 1 and int(new.sum()) > 20 * len(goals):
            counts = np.array([(given[new][:, 0] == goal).sum() for goal in goals])
            assert abs(chi_square_z(counts, np.full(len(goals), 1 / len(goals)))) < 5
    if could > 100:
        assert abs(did - fraction * could) < 5 * np.sqrt(could * fraction * (1 - fraction) + 1)


@pytest.mark.parametrize(
    ("view", "strategy", "lanes"),
    [
        ("steps", "future", 3),
        ("final", "episode", None),
        ("next step", "final", 3),
        *(
            pytest.param(view, strategy, lanes, marks=pytest.mark.slow)
            for view in VIEWS
            for strategy in ("future", "final", "episode")
            for lanes in (None, 3)
            if (view, strategy, lanes)
            not in (("steps", "future", 3), ("final", "episode", None), ("next step", "final", 3))
        ),
    ],
)
def test_goals_are_of_the_same_episode(view: str, strategy: str, lanes: int | None) -> None:
    for seed in range(2):
        follow(view, strategy, lanes, seed)


@pytest.mark.slow
def test_always_and_never() -> None:
    follow("one step", "future", None, 0, fraction=1.0)
    follow("one step", "future", None, 0, fraction=0.0)


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


def test_rewards_below_the_observation_are_refused() -> None:
    goal = np.zeros(2, np.float32)
    rows = {"obs": {"achieved_goal": goal, "desired_goal": goal, "reward": 0.0}, "action": 0}
    buffer = fbuf.Buffer(10, view=Hindsight(Transition(reward="obs/reward"), reward))
    with pytest.raises(ValueError, match="'obs/reward' is part of the observation 'obs'"):
        buffer.init(rows | {"terminated": False, "truncated": False})


def test_a_reward_that_jax_cannot_trace() -> None:
    goal = np.zeros(2, np.float32)
    rows = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": 0, "reward": 0.0}
    buffer = fbuf.Buffer(
        10, view=Hindsight(Transition(), lambda achieved, goal: 0.0 if (achieved == goal).all() else -1.0)
    )
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        buffer.init(rows | {"terminated": False, "truncated": False})
    assert "jnp.where for if" in error.value.__notes__[-1]


def test_what_is_not_relabelled_is_as_without_it() -> None:
    """The same key draws the same transitions."""
    rows = {
        "obs": {
            "desired_goal": jnp.arange(40.0),
            "achieved_goal": jnp.arange(40.0),
            "frame": jnp.arange(40, dtype=jnp.uint8),
        },
        "action": jnp.arange(40),
        "reward": jnp.arange(40.0),
        "terminated": jnp.arange(40) % 9 == 8,
        "truncated": jnp.zeros(40, bool),
    }
    inner = Transition(n_step=3, stack=4)
    plain = fbuf.Buffer(100, view=inner, sampler=fbuf.samplers.Prioritized())
    view = Hindsight(inner, lambda achieved, goal: achieved - goal, fraction=0.5)
    both = dataclasses.replace(plain, view=view)
    batches = []
    for buffer in (plain, both):
        state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
        batches.append(buffer.sample(state, jax.random.key(0), 256)[1])
    one, two = batches
    new = two.data.pop("relabelled")
    assert 60 < int(new.sum()) < 140 and bool((one.index.slot == two.index.slot).all())
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[~new], b[~new]), one.data, two.data)
    for name in ("action", "discount", "terminated"):
        assert bool((one.data[name] == two.data[name]).all())
    assert bool((one.data["obs"]["frame"] == two.data["obs"]["frame"]).all())


def test_rewards_of_whole_numbers_and_a_goal_beside_the_observation() -> None:
    """A sparse reward over rows that hold int32 rewards; the goal is a leaf of its own."""
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
    view = Hindsight(Transition(), lambda achieved, goal: -0.25 * (achieved != goal), "goal", "at", fraction=1.0)
    buffer = fbuf.Buffer(100, view=view, storage=fbuf.storages.Host(keys=("at", "goal")))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.sample(state, jax.random.key(0), 200)[1].data
    assert bool(data["relabelled"].all()) and data["goal"].dtype == jnp.int32
    reached = data["goal"] == (data["action"] + 1) // 2
    assert np.array_equal(data["reward"], np.where(reached, 0.0, -0.25)) and 0 < int(reached.sum()) < 200


@pytest.mark.parametrize(
    "storage",
    [fbuf.storages.Device(), pytest.param(fbuf.storages.Compressed(keys=("obs/frame",)), marks=pytest.mark.slow)],
)
def test_steps_are_in_place(storage: Any) -> None:
    view = Hindsight(Transition(n_step=2, stack=2, final_observation="last"), reward)
    buffer = fbuf.Buffer(200_000, lanes=2, view=view, storage=storage)
    number = np.zeros((), int)
    rows = {
        "obs": observation(number, number, 0.0),
        "last": observation(number, number, 0.0),
        "action": np.int32(0),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    }
    assert_draw_write_draw(buffer, rows, buffer.init(rows))


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
    rows = {
        "obs": {"achieved_goal": np.zeros(2, np.float32), "desired_goal": np.zeros(2, np.float32)} | change,
        "action": np.int32(0),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    }
    rows["obs"] = {n: x for n, x in rows["obs"].items() if x is not None}
    buffer = fbuf.Buffer(10, view=Hindsight(Transition(), reward))
    with pytest.raises(ValueError, match=re.escape(message)):
        buffer.init(rows)


def test_a_reward_of_another_shape() -> None:
    goal = np.zeros(2, np.float32)
    rows = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": 0, "reward": 0.0}
    rows |= {"terminated": False, "truncated": False}
    buffer = fbuf.Buffer(10, view=Hindsight(Transition(), lambda achieved, goal: achieved - goal))
    with pytest.raises(
        ValueError, match=r"reward\(achieved_goal, goal\) gives float32\[2\]; expected real numbers of shape \[\]"
    ):
        buffer.init(rows)


def test_the_episode_around_a_row_is_found_wherever_the_ring_stands() -> None:
    """Episodes of one to five rows go round a ring of eleven, one to three rows at a time."""
    goal, rng = np.zeros(2, np.float32), np.random.default_rng(0)
    example = {"obs": {"achieved_goal": goal, "desired_goal": goal}, "action": 0, "reward": 0.0}
    buffer = fbuf.Buffer(11, view=Hindsight(Transition(), reward))
    state = buffer.init(example | {"terminated": False, "truncated": False})
    around = jax.jit(fbuf._anchors.episode_around, static_argnums=2)
    ends: list[bool] = []
    for _ in range(20):
        new = rng.random(3) < 0.4
        rows = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (3, *np.shape(x))), example)
        mask = np.arange(3) < rng.integers(1, 4)
        state = buffer.extend(state, rows | {"terminated": new, "truncated": np.zeros(3, bool)}, mask=mask)
        ends += new[mask].tolist()
        held = min(len(ends), 11)
        episode = np.cumsum([0, *ends])[:-1][-held:]
        age = np.arange(11, dtype=np.int32)
        first, last = around(state.anchors.starts, state.ring, buffer.geometry, np.zeros(11, np.int32), age)
        np.testing.assert_array_equal(first[:held], np.searchsorted(episode, episode))
        np.testing.assert_array_equal(last[:held], np.searchsorted(episode, episode, side="right") - 1)
