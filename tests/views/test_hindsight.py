"""`views.Hindsight`: goals of the same episode and of no other, rewards to match, wherever the ring's end is."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Hindsight, Transition
from tests.support import refusals, same_step
from tests.support.inplace import assert_draw_write_draw
from tests.support.tables import by_tier
from tests.support.trees import row_with
from tests.support.uniformity import chi_square_z

LENGTH, DRAWS = 31, 2**12
FINAL = 0.5  # added to a row's number: what its true final observation achieved


def reward(achieved, goal):
    return achieved[0] * 1000 + goal[0] + 7 * goal[1]


VIEWS = {
    "one step": same_step.Transition(),
    "steps": same_step.Transition(n_step=3, gamma=0.5, stack=2),
    "final": Transition(n_step=2, gamma=0.5, final_observation="last"),
    "next step": Transition(n_step=2, gamma=0.5, autoreset="next_step"),
    "frames": Transition(stack=3, final_observation="last", pad="repeat"),
}
Seen = collections.namedtuple("Seen", "lane number first end terminated reset")  # `first`: of its episode


class Oracle:
    def __init__(self, view, lanes):
        self.view, self.next_step = view, view.autoreset == "next_step"
        self.lanes = [[] for _ in range(lanes)]

    def arrive(self, lane, terminated, truncated):
        past = self.lanes[lane]
        before = past[-1] if past else None
        reset = self.resets_next(lane)
        begins = before is None or (before.reset if self.next_step else before.end)
        number = len(past)
        first = number if begins else before.first
        past.append(Seen(lane, number, first, terminated or truncated, terminated, reset))

    def resets_next(self, lane):
        past = self.lanes[lane]
        return self.next_step and bool(past) and past[-1].end

    def last(self, row):
        return max(other.number for other in self.lanes[row.lane] if other.first == row.first)

    def newest_state(self, row):
        last = self.lanes[row.lane][self.last(row)]
        return last.number + (FINAL if last.end and self.view.final_observation is not None else 0)

    def led_to(self, row):
        if row.end and not self.next_step:
            return row.number + FINAL if self.view.final_observation is not None else None
        return row.number + 1 if row.number < self.last(row) else None

    def counted(self, row):
        rows, cut = [], self.next_step or self.view.final_observation is not None
        for step in range(self.view.n_step):
            here = self.lanes[row.lane][row.number + step]
            if not here.end or here.terminated or cut:
                rows.append(here)
            if here.end:
                break
        return rows

    def goals(self, row, strategy):
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

    def returned(self, row, goal, rewards):
        total = 0.0
        for i, here in enumerate(self.counted(row)):
            own = float(rewards[here.lane, here.number])
            total += self.view.gamma**i * (own if goal is None else self.led_to(here) * 1000 + goal + 7 * row.lane)
        return total


@functools.cache
def verbs(buffer):
    return (
        jax.jit(lambda s, rows, mask: buffer.extend(s, rows, mask=mask), donate_argnums=0),
        jax.jit(lambda s, key: buffer.sample(s, key, DRAWS), donate_argnums=0),
    )


def observation(number, lane, extra):
    achieved = np.stack([number + extra, lane], axis=-1).astype(np.float32)
    frame = (number[..., None] % 251 + 1).astype(np.uint8)
    return {"achieved_goal": achieved, "desired_goal": -1 - achieved, "frame": frame}


def follow(view, strategy, lanes, seed, fraction=0.7):
    width = lanes or 1
    hindsight = Hindsight(VIEWS[view], reward, strategy=strategy, fraction=fraction)
    buffer = fbuf.Buffer(LENGTH * width, lanes=lanes, view=hindsight)
    oracle, rng = Oracle(VIEWS[view], width), np.random.default_rng(seed)
    extend, sample = verbs(buffer)
    rewards = rng.normal(size=(width, 500)).astype(np.float32)
    state = None
    for turn in range(10):
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


def compare(oracle, batch, strategy, fraction, rewards):
    data, lanes = batch.data, len(oracle.lanes)
    assert batch.mask.all() or not batch.mask.any()
    drawn = {}
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
        reached = oracle.led_to(oracle.counted(row)[-1])
        after = next_obs["achieved_goal"][:, -1] if stack else next_obs["achieved_goal"]
        assert reached is None or (after[:, 0] == reached).all()  # the state that the last reward is of
        assert (given[new][:, 1] == lane).all() and set(given[new][:, 0].tolist()) <= set(goals)
        aims = [float(goal) if relabelled else None for goal, relabelled in zip(given[:, 0], new, strict=True)]
        want = {aim: oracle.returned(row, aim, rewards) for aim in set(aims)}
        np.testing.assert_allclose(data["reward"][places], [want[aim] for aim in aims], rtol=1e-5)
        if len(goals) > 1 and int(new.sum()) > 20 * len(goals):
            counts = np.array([(given[new][:, 0] == goal).sum() for goal in goals])
            assert abs(chi_square_z(counts, np.full(len(goals), 1 / len(goals)))) < 5
    if could > 100:
        assert abs(did - fraction * could) < 5 * np.sqrt(could * fraction * (1 - fraction) + 1)


GOAL = np.zeros(2, np.float32)
GOALS = {"achieved_goal": GOAL, "desired_goal": GOAL}


def init(obs, reward=reward, name="reward"):
    rows = row_with(obs)
    rows = rows if name in rows else {n: x for n, x in rows.items() if n != "reward"}
    fbuf.Buffer(10, view=Hindsight(same_step.Transition(reward=name), reward)).init(rows)


CASES = by_tier(("final", "future", 3), ("steps", "episode", None), more=[("next step", "future", None)])


@pytest.mark.parametrize(("view", "strategy", "lanes"), CASES)
def test_goals_are_of_the_same_episode(view, strategy, lanes):
    follow(view, strategy, lanes, seed=0)


@pytest.mark.more
def test_goals_beside_stacked_frames():
    """Where only the frames are stacked, goals and rewards are those of the newest of whole stacks."""
    number = np.arange(40)
    rows = {"obs": observation(number, number * 0, 0.0), "last": observation(number, number * 0, FINAL)}
    rows |= {"action": number.astype(np.int32), "reward": np.zeros(40, np.float32)}
    rows |= {"terminated": number % 9 == 8, "truncated": np.zeros(40, bool)}
    made = []
    for stack_keys in (None, ("obs/frame",)):
        inner = Transition(n_step=2, stack=3, stack_keys=stack_keys, final_observation="last")
        buffer = fbuf.Buffer(64, view=Hindsight(inner, reward, fraction=0.8))
        state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
        made.append(jax.device_get(buffer.sample(state, jax.random.key(1), 128)[1].data))
    every, some = made
    for name in ("obs", "next_obs"):
        for goal in ("achieved_goal", "desired_goal"):
            every[name][goal] = every[name][goal][:, -1]
    jax.tree.map(np.testing.assert_array_equal, every, some)
    assert 80 < some["relabelled"].sum() < 128


STEPS = same_step.Transition()
WRONG = """
Hindsight(fbuf.views.Row(), reward) => TypeError view is Row(); expected a views.Transition
Hindsight(STEPS, reward, goal=5) => TypeError goal is 5; expected the name of a leaf
Hindsight(STEPS, reward, "obs", "obs") => ValueError goal and achieved are both 'obs'
Hindsight(STEPS, "reward") => TypeError expected a function reward(achieved_goal, goal)
Hindsight(STEPS, reward, strategy="past") => ValueError strategy is 'past'; expected "future"
Hindsight(STEPS, reward, fraction=4) => ValueError fraction is 4; expected a number in [0, 1]
init({"achieved_goal": GOAL}) => ValueError no leaf named 'obs/desired_goal'; rows have
init(GOALS | {"achieved_goal": np.zeros(3, np.float32)}) => ValueError
    is float32[2], but 'obs/achieved_goal' is float32[3]
init(GOALS | {"achieved_goal": np.zeros(2, np.int32)}) => ValueError
    is float32[2], but 'obs/achieved_goal' is int32[2]
init(GOALS, lambda achieved, goal: achieved - goal) => ValueError returns float32[2]; expected real numbers of shape []
init(GOALS | {"reward": 0.0}, name="obs/reward") => ValueError
    the reward 'obs/reward' is part of 'obs'; expected a leaf of its own.
"""


@pytest.mark.parametrize("case", refusals.cases(WRONG))
def test_wrong_settings(case):
    refusals.check(case, globals())


def test_a_reward_that_branches_is_told_what_to_write():
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        init(GOALS, lambda achieved, goal: 0.0 if (achieved == goal).all() else -1.0)
    assert "jnp.where instead of if" in error.value.__notes__[-1]


@pytest.mark.more
def test_goals_of_stacked_frames_are_of_the_same_episode():
    follow("frames", "future", None, seed=0)


@pytest.mark.more
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("view", VIEWS)
def test_goals_of_every_strategy_are_of_the_same_episode(view, strategy, lanes):
    for seed in range(1, 3):
        follow(view, strategy, lanes, seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_always_and_never(fraction):
    follow("one step", "future", None, 0, fraction=fraction)


@pytest.mark.exhaustive
@pytest.mark.in_place
@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs/frame",))])
def test_steps_are_in_place(storage):
    view = Hindsight(Transition(n_step=2, stack=2, final_observation="last"), reward)
    buffer = fbuf.Buffer(200_000, lanes=2, view=view, storage=storage)
    number = np.zeros((), int)
    rows = row_with(observation(number, number, 0.0), last=observation(number, number, 0.0))
    assert_draw_write_draw(buffer, rows, buffer.init(rows))
