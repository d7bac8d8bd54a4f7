"""`Actor`: play games with an epsilon-greedy policy and return rows.

The last 4 frames of each game are kept here, so acting does not read the replay. They are padded as by the view, with zeros
before an episode's first frame, so the network acts on the stacks it learns from.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from fbuf.demo import _dqn
from fbuf.demo._atari import VectorAtari


class Episode(NamedTuple):
    """A finished game."""

    end: int  # steps of its lane played until then
    score: float  # sum of rewards, not clipped


class Actor:
    """A policy in `E` games.

    Attributes:
      episodes: The games that have ended, in order.
      stacks: uint8[E, 4, 84, 84], the input of the next actions. Each step makes a new array, since JAX may still read the
        old.
      time: Steps played so far in each lane.
    """

    def __init__(self, env: VectorAtari, key: jax.Array) -> None:
        """Start the games.

        Args:
          env: `E` games; one step is one frame of each.
          key: Of all random choices; not shared.
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
        """Play `steps` frames in every lane.

        Args:
          params: Current parameters of the network.
          steps: N >= 1.
          epsilon: Probability of a random action.
        Returns:
          Rows with leaves `[N, E, ...]`; rewards are clipped to their sign (Mnih et al. 2015).
        """
        rows = []
        for _ in range(steps):
            action = np.asarray(self._act(params, self.stacks, self._key, np.int32(self.time), np.float32(epsilon)))
            obs, reward, terminated, truncated = self._env.step(action)
            row = {"obs": self._obs, "action": action, "reward": np.sign(reward)}
            rows.append({**row, "terminated": terminated, "truncated": truncated})
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
    """Return stacks of episodes' first frames, `[E, 84, 84]` -> `[E, 4, 84, 84]`: zeros, then the frame."""
    return np.pad(obs[:, None], ((0, 0), (_dqn.STACK - 1, 0), (0, 0), (0, 0)))


def next_stacks(
    stacks: npt.NDArray[np.uint8], obs: npt.NDArray[np.uint8], ended: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Return the stacks one frame later; where an episode `ended`, `obs` is the first frame of the next one."""
    kept = np.where(ended[:, None, None, None], np.uint8(0), stacks[:, 1:])
    return np.concatenate([kept, obs[:, None]], axis=1)
