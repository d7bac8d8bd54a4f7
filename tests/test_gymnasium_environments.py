"""`fbuf.gymnasium` with CartPole, Atari, structured spaces, processes, single environments, limits and interrupts."""

import functools
from collections import Counter, OrderedDict
from typing import Any

import ale_py
import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

import fbuf
from tests.support.lander import GAMMA, MODES, Lander, Structured, action_at, by_hand, drawn, play, vectorise

pytestmark = pytest.mark.more

gymnasium.register_envs(ale_py)
BREAKOUT = {"obs_type": "ram", "frameskip": 12, "repeat_action_probability": 0.25, "max_episode_steps": 50}
atari = functools.partial(gymnasium.make, "ALE/Breakout-v5", **BREAKOUT)
cartpole = functools.partial(gymnasium.make, "CartPole-v1")
NAMES = [mode.name for mode in MODES]


def recorded(envs, capacity=1200, **parts):
    example, lanes = fbuf.gymnasium.spec(envs), getattr(envs, "num_envs", None)
    limit = parts.pop("limit", None)
    buffer = fbuf.prioritized(capacity, view=fbuf.gymnasium.view(envs, gamma=GAMMA), lanes=lanes, **parts)
    replay = fbuf.Replay(buffer, example, limit=limit)
    return fbuf.gymnasium.Recorder(envs, replay), replay, example


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
@pytest.mark.parametrize("make", [Structured, cartpole, atari], ids=["structured", "cartpole", "atari"])
def test_draws_are_the_transitions_of_environments_stepped_by_hand(make, mode):
    envs, replay, example = recorded(vectorise(make, 3, mode))
    counts = play(envs, 150)
    assert drawn(replay, example) == by_hand(make, example, counts)


class OneAtari(gymnasium.Env[Any, Any]):
    """One environment of `AtariVectorEnv`, reset by hand."""

    def __init__(self):
        self.envs = native(1, AutoresetMode.NEXT_STEP)
        self.observation_space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space
        self.ended = False

    def reset(self, *, seed=None, options=None):
        return (self.envs.step(np.zeros(1, int)) if self.ended else self.envs.reset(seed=seed))[0][0], {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.envs.step(np.array([action]))
        self.ended = bool(terminated[0] or truncated[0])
        return obs[0], reward[0], terminated[0], truncated[0], info


def native(lanes, mode):
    size = {"img_height": 21, "img_width": 21, "stack_num": 2}
    return AtariVectorEnv("breakout", lanes, autoreset_mode=mode, max_num_frames_per_episode=160, noop_max=0, **size)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=NAMES[:2])
def test_of_atari_environments_in_threads(mode):
    envs = native(2, mode)
    native(1, AutoresetMode.SAME_STEP if mode == AutoresetMode.NEXT_STEP else AutoresetMode.NEXT_STEP)
    envs, replay, example = recorded(envs)  # environments of another mode do not change how these are recorded
    counts = play(envs, 150)
    found = drawn(replay, example)
    assert found == by_hand(OneAtari, example, counts) and sum(found.values()) > 250


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_no_other_transition_is_drawn_when_rows_are_overwritten(mode):
    envs, replay, example = recorded(vectorise(Lander, 3, mode), capacity=60)
    counts = play(envs, 100)
    found = drawn(replay, example)
    assert found <= by_hand(Lander, example, counts) and sum(found.values()) > 40


def test_windows_are_the_same_in_all_modes_that_reset_at_once():
    batches = []
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        envs = vectorise(Lander, 3, mode)
        view = fbuf.views.Sequence(4, boundary="mask", autoreset="next_step")
        replay = fbuf.Replay(fbuf.Buffer(600, view=view, lanes=3), fbuf.gymnasium.spec(envs))
        play(fbuf.gymnasium.Recorder(envs, replay), 60)
        batches.append(replay.sample(256, to="numpy").data)
    assert all(np.array_equal(*leaves) for leaves in zip(*(batch.values() for batch in batches), strict=True))
    learnable, state = batches[0]["learning_mask"], batches[0]["obs"]
    final = batches[0]["mask"] & ~learnable
    assert final.any() and (state[learnable][:, 0] >= 0).all()  # it has not landed
    assert not any(batches[0][name][final].any() for name in ("reward", "terminated", "truncated"))


class Ordered(Structured):
    """Returns observations as `OrderedDict`, as parking-v0 of highway-env 1.12.1 does."""

    def _observe(self):
        return OrderedDict(super()._observe())


@pytest.mark.parametrize(("make", "like"), [(Lander, Lander), (Ordered, Structured)])
def test_one_environment(make, like):
    env, replay, example = recorded(make())
    env.reset(seed=0)
    episode, time, count = 0, 0, 60
    for _ in range(count):
        _, _, terminated, truncated, _ = env.step(action := action_at(env.action_space, 0, episode, time))
        time += 1
        if terminated or truncated:
            pytest.raises(RuntimeError, env.step, action).match(r"were not reset. Call reset\(\)")
            env.reset()
            episode, time = episode + 1, 0
    assert drawn(replay, example) == by_hand(like, example, [count])


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
@pytest.mark.parametrize("written", [False, True])
def test_no_transition_crosses_a_step_that_failed(mode, written):
    envs, replay, example = recorded(vectorise(Lander, 3, mode))
    add, allowed = replay.add, [17]

    def interrupted(*args, **kwargs):
        allowed[0] -= 1
        if written:
            add(*args, **kwargs)
        if allowed[0] < 0:
            raise KeyboardInterrupt
        if not written:
            add(*args, **kwargs)

    replay.add = interrupted
    expected = by_hand(Lander, example, [0])
    for seed in range(8):
        allowed[0] = 3 * seed
        pytest.raises(KeyboardInterrupt, play, envs, 100, seed=seed)
        with pytest.raises(RuntimeError, match="not running"):
            envs.step(np.zeros(3, int))
        expected += by_hand(Lander, example, [100] * 3, seed=seed)
    del replay.add
    found, zero = drawn(replay, example), np.float32(0).tobytes()
    # the final observation of an episode that ended in the last step before is lost: `next_obs` is `obs`, discount 0
    lost = {(*key[:4], key[0]): count for key, count in expected.items() if key[3] == zero}
    assert found <= expected + Counter(lost) and sum(found.values()) > 120
    assert sum((found - expected).values()) < 8


def test_a_replay_that_holds_rows_is_cut_before_the_first():
    envs, replay, example = recorded(vectorise(Lander, 3, AutoresetMode.NEXT_STEP))
    counts = play(envs, 20)
    again = vectorise(Lander, 3, AutoresetMode.SAME_STEP)
    more = play(fbuf.gymnasium.Recorder(again, replay), 20, seed=7)
    assert drawn(replay, example) == by_hand(Lander, example, counts) + by_hand(Lander, example, more, seed=7)


def test_same_step_without_final_observations_is_refused():
    class Forgetful(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def step(self, actions):
            return *super().step(actions)[:4], {}

    envs, _, _ = recorded(Forgetful(vectorise(Lander, 3, AutoresetMode.SAME_STEP)))
    pytest.raises(ValueError, play, envs, 30).match("no 'final_obs' in info. Use AutoresetMode.NEXT_STEP")


def test_leaves_of_the_caller():
    envs = vectorise(Lander, 3, AutoresetMode.SAME_STEP)
    example = fbuf.gymnasium.spec(envs) | {"task": np.int32(0)}
    replay = fbuf.Replay(fbuf.Buffer(300, view=fbuf.gymnasium.view(envs), lanes=3), example)
    play(fbuf.gymnasium.Recorder(envs, replay), 30, task=np.arange(3, dtype=np.int32))
    rows = replay.rows()
    tasks = np.asarray(rows.data["task"])[np.asarray(rows.mask)]
    assert len(tasks) > 90 and all((tasks == task).sum() > 30 for task in range(3))  # rows of final observations too
    with pytest.raises(TypeError, match="multiple values for keyword argument 'reward'"):
        play(fbuf.gymnasium.Recorder(envs, replay), 1, reward=np.zeros(3))
