"""`Actor`: plays the games with an epsilon-greedy policy and hands out rows.

The last 4 frames of each game are kept beside the environment and not read back from the replay: acting then costs the
replay nothing, and works before anything is stored. They are padded as the view pads, with zeros before the first frame
of an episode, so that the network acts on the very stacks it learns from.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from fbuf.demo import _dqn


class Environment(Protocol):
    """What the actor needs of `VectorAtari`."""

    lanes: int
    num_actions: int

    def reset(self) -> npt.NDArray[np.uint8]: ...
    def step(self, actions: npt.ArrayLike) -> tuple[Any, Any, Any, Any]: ...


class Episode(NamedTuple):
    """A finished game."""

    end: int  # steps of its lane played until then
    score: float  # sum of rewards, not clipped


class Actor:
    """A policy in `E` games.

    Attributes:
      episodes: The games that have ended, in order.
      stacks: uint8[E, 4, 84, 84], what the next actions are chosen from. Never written to: a new array every step,
        because JAX may still read the one before.
      time: Steps played so far in each lane.
    """

    def __init__(self, env: Environment, key: jax.Array) -> None:
        """Starts the games.

        Args:
          env: `E` games; a step of it is one frame of each.
          key: Of every random choice; not shared with others.
        """
        self._env = env
        self._key = key
        self._act = jax.jit(_dqn.act)
        self._score = np.zeros(env.lanes, np.float64)
        self.episodes: list[Episode] = []
        self.time = 0
        self._obs = env.reset()
        self.stacks = first_stacks(self._obs)

    def play(self, params: _dqn.Params, steps: int, epsilon: float) -> _dqn.Rows:
        """Plays `steps` frames in every lane.

        Args:
          params: Of the network, as they are now.
          steps: N >= 1.
          epsilon: Probability of a random action.
        Returns:
          Rows with leaves `[N, E, ...]`; their reward is clipped to its sign (Mnih et al. 2015).
        """
        rows = []
        for _ in range(steps):
            chosen = self._act(params, self.stacks, self._key, np.int32(self.time), np.float32(epsilon))
            action = np.asarray(chosen)
            obs, reward, terminated, truncated = self._env.step(action)
            rows.append(
                {
                    "obs": self._obs,
                    "action": action,
                    "reward": np.sign(reward),
                    "terminated": terminated,
                    "truncated": truncated,
                }
            )
            self.time += 1
            self._count(reward, terminated | truncated)
            self.stacks = next_stacks(self.stacks, obs, terminated | truncated)
            self._obs = obs
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _count(self, reward: npt.NDArray[np.float32], ended: npt.NDArray[np.bool_]) -> None:
        self._score += reward
        self.episodes += [Episode(self.time, float(score)) for score in self._score[ended]]
        self._score[ended] = 0


def first_stacks(obs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Stacks of the first frames of episodes, `[E, 84, 84]` -> `[E, 4, 84, 84]`: zeros, and the frame last."""
    stacks = np.zeros((obs.shape[0], _dqn.STACK, *obs.shape[1:]), obs.dtype)
    stacks[:, -1] = obs
    return stacks


def next_stacks(
    stacks: npt.NDArray[np.uint8], obs: npt.NDArray[np.uint8], ended: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """The stacks one frame on; where an episode `ended`, `obs` is the first frame of the next one."""
    kept = np.where(ended[:, None, None, None], np.uint8(0), stacks[:, 1:])
    return np.concatenate([kept, obs[:, None]], axis=1)
