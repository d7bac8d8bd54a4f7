"""A stand-in for the games of the demo."""

import numpy as np
import pytest

from fbuf.demo import _dqn, _run


class Blocks:
    """A stand-in for the games: lane, episode and time can be read off every frame; episodes end after 5 to 12 steps.

    Each episode ends for good except in lane 0, where it is cut off.
    """

    num_actions = 3

    def __init__(self, game, lanes, seed):
        self.lanes, self._rng = lanes, np.random.default_rng(seed)

    def reset(self):
        self._age, self._episode = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.int64)
        self._left = self._rng.integers(5, 13, self.lanes)
        return self._frames()

    def step(self, actions):
        self._age += 1
        self._left -= 1
        ended = self._left == 0
        self._episode[ended] += 1
        self._age[ended] = 0
        self._left[ended] = self._rng.integers(5, 13, ended.sum())
        reward = 3 * (np.asarray(actions) == 1).astype(np.float32)
        cut = ended & (np.arange(self.lanes) == 0)
        return self._frames(), reward, ended & ~cut, cut

    def _frames(self):
        frames = np.zeros((self.lanes, 84, 84), np.uint8)
        frames[:, 0, 0] = np.arange(self.lanes) + 1
        frames[:, 0, 1] = self._episode % 250 + 1
        frames[:, 0, 2] = self._age + 1
        frames[:, 40:60, 10:70] = 13 * (self._age % 12)[:, None, None]
        return frames


def shrink(patch):
    patch.setattr(_run, "_PREFILL", 20)
    patch.setattr(_run, "CAPACITY", 240)


def run_all(names):
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        settings = _run.Settings("blocks", seed=3, steps=8)
        return {name: _run.run(name, settings, Blocks) for name in names}


def some_rows(steps, lanes=8):
    env, random = Blocks("blocks", lanes, 0), np.random.default_rng(0)
    frame, rows = env.reset(), []
    for _ in range(steps):
        action = random.integers(0, 3, lanes).astype(np.int32)
        after, reward, terminated, truncated = env.step(action)
        rows.append((frame, action, np.sign(reward), terminated, truncated))
        frame = after
    return dict(zip(_dqn.example_row(), map(np.stack, zip(*rows, strict=True)), strict=True))
