#!/usr/bin/env bash
# An episode of one step is never closed in d3rlpy's ReplayBuffer: clip_episode(terminated=True) does nothing, and the next
# episode is appended to it. Its terminal flag is lost, and its next observation is the first of the next episode. If all
# episodes have one step, as in a bandit, every second row is wrong, and half of the episodes exist. It concerns append and
# clip_episode, so fit_online and collect too. Pass whole episodes to append_episode instead.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 h5py==3.16.0 gymnasium==1.0.0 gym==0.26.2 tqdm==4.70.1 \
  click==8.5.1 structlog==26.1.0 colorama==0.4.6 dataclasses-json==0.6.7 scikit-learn==1.9.1
"$work/venv/bin/pip" install --quiet --no-deps d3rlpy==2.8.1
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import sys

import d3rlpy
import gymnasium
import numpy as np
import structlog
from d3rlpy.algos import DQNConfig

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))

class Episodes(gymnasium.Env):
    """Episodes of these lengths. An observation is 100 times the number of the episode, plus the step in it."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, lengths):
        self.lengths, self.episode = lengths, 0

    def observation(self):
        return np.array([100 * self.episode + self.step_in_it], np.float32)

    def reset(self, seed=None, options=None):
        self.episode, self.step_in_it = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.step_in_it += 1
        end = self.step_in_it == self.lengths[(self.episode - 1) % len(self.lengths)]
        return self.observation(), 1.0, end, False, {}

def collected(lengths, steps):
    env = Episodes(lengths)
    replay = d3rlpy.dataset.create_fifo_replay_buffer(1000, env=env)
    dqn = DQNConfig().create()
    dqn.build_with_env(env)
    dqn.collect(env, replay, n_steps=steps, show_progress=False)
    rows = [replay.transition_picker(*replay.buffer[index]) for index in range(replay.transition_count)]
    ends = [[int(row.observation[0]), int(row.next_observation[0]), bool(row.terminal)] for row in rows]
    joined = sum(next_ // 100 > first // 100 for first, next_, _ in ends)
    return ends, joined, sum(end for *_, end in ends), replay.size()

print(f"d3rlpy {d3rlpy.__version__}, numpy {np.__version__}")
mixed, *_ = collected([3, 1, 2], 6)
print("observation, next observation, terminal of episodes of 3, 1 and 2 steps (d3rlpy stores zeros as the next of a terminal)")
expected = [[100, 101, False], [101, 102, False], [102, 0, True], [200, 0, True], [300, 301, False], [301, 0, True]]
print(f"expected: {expected}")
print(f"happened: {mixed}")
_, joined, terminal, episodes = collected([1], 1000)
print("1,000 episodes of one step: expected: 1,000 terminal rows, none joined to another episode, 1,000 episodes")
print(f"happened: {terminal} terminal rows, {joined} joined to the next episode, {episodes} episodes")
as_found = mixed[3] == [200, 300, False] and mixed[:3] + mixed[4:] == expected[:3] + expected[4:]
sys.exit(0 if as_found and joined == terminal == episodes == 500 else "This is no longer so.")
EOF
