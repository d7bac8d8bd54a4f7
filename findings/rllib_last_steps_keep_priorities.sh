#!/usr/bin/env bash
# RLlib's PrioritizedEpisodeReplayBuffer rejects a draw of one of the last n - 1 steps of an episode and draws again. So with
# n-step returns no batch starts at these steps, and nothing ever sets their priorities: they keep that of a new row, while
# those of all others fall as TD errors do. In the end most draws are rejected. Use n_step=1 where episodes are short.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet "ray[rllib]==2.60.0" numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import logging
import sys

import gymnasium
import numpy as np

logging.disable(logging.WARNING)
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

EPISODES, LENGTH, N, ERROR = 100, 20, 3, 0.01
print(f"ray {importlib.metadata.version('ray')}, {EPISODES} episodes of {LENGTH} steps, n_step {N}, alpha 0.6; TD errors become {ERROR}")

def episode():  # the number of a step is its observation
    space = gymnasium.spaces.Box(0.0, LENGTH, (1,))
    made = SingleAgentEpisode(observation_space=space, action_space=gymnasium.spaces.Discrete(2))
    made.add_env_reset(observation=np.zeros(1, np.float32))
    for step in range(1, LENGTH + 1):
        made.add_env_step(np.full(1, step, np.float32), 0, 1.0, terminated=step == LENGTH)
    return made

draws = 0

class Buffer(PrioritizedEpisodeReplayBuffer):
    def _update_sample_metrics(self, *, num_resamples, **metrics):
        global draws
        draws = 32 + num_resamples
        super()._update_sample_metrics(num_resamples=num_resamples, **metrics)

buffer, started = Buffer(capacity=100_000, alpha=0.6), np.zeros(LENGTH, int)
for _ in range(EPISODES):
    buffer.add(episode())
rejected = []
for _ in range(600):
    for sampled in buffer.sample(32, n_step=N, beta=0.4, gamma=1.0):
        started[int(sampled.get_observations(0)[0])] += 1
    rejected.append(1 - 32 / draws)
    buffer.update_priorities(np.full(32, ERROR))
first, last = np.mean(rejected[:50]), np.mean(rejected[-50:])
print(f"expected: all steps start returns, the last ones shorter ones; of {started.sum():,} draws at each of the last {N - 1}: {started.sum() // LENGTH:,}")
print(f"happened: at the last {N - 1}: {started[1 - N:].tolist()}; of the draws {first:.0%} were rejected at first, {last:.0%} at the end")
sys.exit(0 if not started[1 - N :].any() and first < 0.25 and last > 0.5 else "This is no longer so.")
EOF
