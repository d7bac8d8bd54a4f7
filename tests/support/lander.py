"""Small environments of Gymnasium, and the transitions that `fbuf.gymnasium.Recorder` must record of any environment."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

import fbuf

MODES = list(AutoresetMode)
GAMMA = 0.9
Transitions = Counter[tuple[bytes, ...]]


class Lander(gymnasium.Env[Any, Any]):
    """Falls from a random height. Lands (terminated), or runs out of time (truncated); sometimes both at once."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._time = 0
        self._state = self.np_random.uniform(1, 4, 3)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._time += 1
        self._state += [-0.3, 0.1 * self._thrust(action), self.np_random.normal()]
        terminated, truncated = bool(self._state[0] < 0), self._time >= 9
        return self._observe(), float(self._state[1]), terminated, truncated, {"time": self._time}

    def _thrust(self, action: Any) -> float:
        return float(action) - 1

    def _observe(self) -> Any:
        return self._state  # one array for all steps


class Structured(Lander):
    """The same with observations and actions of all spaces that arrays can hold."""

    observation_space = spaces.Dict(
        {
            "state": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "time": spaces.Discrete(10),
            "pair": spaces.Tuple([spaces.MultiBinary(2), spaces.MultiDiscrete([3, 4])]),
        }
    )
    action_space = spaces.Dict({"thrust": spaces.Box(-1, 1, (), np.float32), "legs": spaces.MultiDiscrete([2, 2])})

    def _thrust(self, action: Any) -> float:
        return float(action["thrust"])

    def _observe(self) -> Any:
        bits, number = np.array([self._time % 2, 1], np.int8), np.array([self._time % 3, self._time % 4])
        return {"time": self._time, "state": self._state, "pair": (bits, number)}


def action_at(space: Any, lane: int, episode: int, step: int) -> Any:
    """The action of a step, whatever the autoreset mode."""
    space.seed(lane * 1_000_003 + episode * 1009 + step)
    return space.sample()


def play(envs: Any, steps: int, seed: int = 0, **leaves: Any) -> list[int]:
    """Step a recorder, as a user would, and return how many steps of each environment count."""
    lanes, space, disabled = envs.num_envs, envs.single_action_space, AutoresetMode.DISABLED
    mode = getattr(envs, "autoreset_mode", envs.metadata["autoreset_mode"])
    envs.reset(seed=seed)
    episode, time, count, ended = [0] * lanes, [0] * lanes, [0] * lanes, np.zeros(lanes, bool)
    for _ in range(steps):
        actions = [action_at(space, *at) for at in zip(range(lanes), episode, time, strict=True)]
        ignored = ended if mode == AutoresetMode.NEXT_STEP else np.zeros(lanes, bool)
        batched = concatenate(space, actions, create_empty_array(space, lanes))
        _, _, terminated, truncated, _ = envs.step(batched, **leaves)
        ended = terminated | truncated
        for lane in range(lanes):
            count[lane] += not ignored[lane]
            time[lane] += not ignored[lane]
            if ended[lane]:
                episode[lane], time[lane] = episode[lane] + 1, 0
        if mode == disabled and ended.any():
            envs.reset(options={"reset_mask": ended})
    if mode == AutoresetMode.NEXT_STEP and ended.any():
        envs.step(batched, **leaves)  # the final observations of the last steps
        for lane in np.flatnonzero(~ended):
            count[lane] += 1
    return count


def by_hand(make: Callable[[], Any], example: Any, counts: list[int], seed: int = 0) -> Transitions:
    """The first transitions of single environments, without the last one if its episode goes on."""
    found: Transitions = Counter()
    for lane, count in enumerate(counts):
        env, episode, time = make(), 0, 0
        obs, _ = env.reset(seed=seed + lane)
        obs = jax.tree.map(np.array, obs)
        for step in range(count):
            action = action_at(env.action_space, lane, episode, time)
            following, reward, terminated, truncated, _ = env.step(action)
            following = jax.tree.map(np.array, following)
            if step < count - 1 or terminated or truncated:
                discount = np.float32(0 if terminated else GAMMA)
                found[_key(example, obs, action, reward, discount, following)] += 1
            obs, time = following, time + 1
            if terminated or truncated:
                obs, episode, time = jax.tree.map(np.array, env.reset()[0]), episode + 1, 0
    return found


def drawn(replay: fbuf.Replay, example: Any, most: int = 512) -> Transitions:
    buffer, state = replay.buffer, replay.state
    if not isinstance(buffer.sampler, fbuf.samplers.Epoch):
        other = fbuf.Buffer(buffer.capacity, view=buffer.view, sampler=fbuf.samplers.Epoch(), lanes=buffer.lanes)
        buffer, state = other, buffer.convert(other, state)
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), most))
    data = batch.data
    leaves = [data[name] for name in ("obs", "action", "reward", "discount", "next_obs")]
    rows = [jax.tree.map(lambda x, i=i: x[i], leaves) for i in np.flatnonzero(batch.mask)]
    assert 0 < len(rows) < most
    return Counter(_key(example, *row) for row in rows)


def _key(example: Any, obs: Any, action: Any, reward: Any, discount: Any, following: Any) -> tuple[bytes, ...]:
    like = [example["obs"], example["action"], example["reward"], np.float32(0), example["obs"]]
    cast = jax.tree.map(lambda leaf, x: np.asarray(x, leaf.dtype), like, [obs, action, reward, discount, following])
    return tuple(leaf.tobytes() for leaf in jax.tree.leaves(cast))


def vectorise(make: Callable[[], Any], lanes: int, mode: AutoresetMode, **options: Any) -> Any:
    return SyncVectorEnv([functools.partial(make) for _ in range(lanes)], autoreset_mode=mode, **options)


def resetting(envs: Any, example: Any, steps: int, rng: np.random.Generator) -> Transitions:
    """Step a recorder, reset environments at random, and return the transitions that must be drawn.

    A transition counts once the next observation of its episode is stored.
    """
    lanes, mode = envs.num_envs, envs.metadata["autoreset_mode"]
    found: Transitions = Counter()
    pending: list[Any] = [None] * lanes
    ended = np.zeros(lanes, bool)
    obs = np.array(envs.reset(seed=1)[0])
    for _ in range(steps):
        kind = rng.choice(3, p=[0.8, 0.15, 0.05])
        mask = ended & (mode == AutoresetMode.DISABLED)
        mask |= (rng.random(lanes) < 0.5) & (kind == 1)
        if kind == 2:
            obs, mask = np.array(envs.reset()[0]), np.ones(lanes, bool)
        elif mask.any():
            obs = np.array(envs.reset(options={"reset_mask": mask.copy()})[0])
        for lane in np.flatnonzero(mask):
            if ended[lane] and pending[lane]:
                found[pending[lane]] += 1
            pending[lane], ended[lane] = None, False
        action = envs.action_space.sample()
        following, reward, terminated, truncated, info = envs.step(action)
        for lane in range(lanes):
            if pending[lane]:
                found[pending[lane]] += 1
            pending[lane] = None
            if ended[lane]:  # the row of the final observation
                continue
            end, after = terminated[lane] | truncated[lane], following[lane]
            if mode == AutoresetMode.SAME_STEP and end:
                after = info["final_obs"][lane]
            discount = np.float32(0 if terminated[lane] else GAMMA)
            transition = _key(example, obs[lane], action[lane], reward[lane], discount, after)
            if end and mode == AutoresetMode.SAME_STEP:
                found[transition] += 1
            else:
                pending[lane] = transition
        ended = (terminated | truncated) & (mode != AutoresetMode.SAME_STEP)
        obs = np.array(following)
    return found
