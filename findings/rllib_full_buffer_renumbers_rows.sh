#!/usr/bin/env bash
# Once RLlib's PrioritizedEpisodeReplayBuffer is full, each `add` that evicts an episode makes a new list of all rows, in
# Python. So it takes the longer the larger the buffer is, whether it adds an episode or a step: with 200,000 rows 30 ms
# instead of 1. Add many episodes in one call.
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
import time

import gymnasium
import numpy as np

logging.disable(logging.WARNING)
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import PrioritizedEpisodeReplayBuffer

LENGTH, ADDS = 50, 10
print(f"ray {importlib.metadata.version('ray')}, an add of an episode of {LENGTH} steps")

def episode():
    space = gymnasium.spaces.Box(0.0, LENGTH, (1,))
    made = SingleAgentEpisode(observation_space=space, action_space=gymnasium.spaces.Discrete(2))
    made.add_env_reset(observation=np.zeros(1, np.float32))
    for step in range(1, LENGTH + 1):
        made.add_env_step(np.full(1, step, np.float32), 0, 1.0, terminated=step == LENGTH)
    return made

def seconds(buffer):
    episodes, times = [episode() for _ in range(ADDS)], []
    for each in episodes:
        begin = time.process_time()
        buffer.add(each)
        times.append(time.process_time() - begin)
    return float(np.median(times))

took = {}
for capacity in (5_000, 200_000):
    buffer = PrioritizedEpisodeReplayBuffer(capacity=capacity)
    for _ in range(capacity // LENGTH - ADDS):
        buffer.add(episode())
    took[capacity] = seconds(buffer), seconds(buffer)  # the first fill it
print("expected: a full buffer takes little longer, whatever its capacity")
for capacity, (filling, full) in took.items():
    print(f"happened with {capacity:>7,} rows: {1e3 * filling:.1f} ms until it is full, then {1e3 * full:.1f} ms")
small, large = took.values()
sys.exit(0 if large[1] > 10 * large[0] and large[1] > 8 * small[1] else "This is no longer so.")
EOF
