#!/usr/bin/env bash
# With n_steps_return, mushroom-rl's replay memories build windows of exactly n steps, and only inside one call of add. If
# Rainbow fits every 4 steps, as is usual on Atari, and n is 3, half of all steps never start a window. If it fits every
# step or every second, nothing is stored and the agent never trains, without a word. The last n - 1 steps of an episode
# start no window, and episodes shorter than n leave no trace of their rewards. Let n_steps_per_fit be many times n.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 matplotlib==3.11.2 tqdm==4.70.1 \
  opencv-python-headless==5.0.0.93 pygame==2.6.1
"$work/venv/bin/pip" install --quiet --no-deps mushroom-rl==1.10.2
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import sys

import mushroom_rl
import numpy as np
import torch
from mushroom_rl.algorithms.value import Rainbow
from mushroom_rl.core import Core, Environment, MDPInfo
from mushroom_rl.policy import EpsGreedy
from mushroom_rl.utils.parameters import Parameter
from mushroom_rl.utils.spaces import Box, Discrete

STEPS, N = 3000, 3

class Episodes(Environment):
    """Episodes of one length, with a reward at the end."""

    def __init__(self, length):
        super().__init__(MDPInfo(Box(0, 1, (1,)), Discrete(2), 0.99, np.inf))
        self.length = length

    def reset(self, state=None):
        self.age = 0
        return np.zeros(1)

    def step(self, action):
        self.age += 1
        end = self.age == self.length
        return np.array([self.age / self.length]), float(end), end, {}

class Features(torch.nn.Module):
    def __init__(self, input_shape, output_shape, **kwargs):
        super().__init__()
        self.layer = torch.nn.Linear(input_shape[0], output_shape[0])

    def forward(self, state, action=None):
        return self.layer(state.float())

def stored(length, **fit):
    env = Episodes(length)
    adam = {"class": torch.optim.Adam, "params": {"lr": 1e-3}}
    network = dict(network=Features, input_shape=(1,), output_shape=(2,), n_actions=2, n_features=4, optimizer=adam)
    memory = dict(initial_replay_size=10 * STEPS, max_replay_size=10 * STEPS, batch_size=32, target_update_frequency=100)
    priorities = dict(n_steps_return=N, alpha_coeff=0.6, beta=Parameter(0.4))
    agent = Rainbow(env.info, EpsGreedy(Parameter(1.0)), network, n_atoms=11, v_min=0, v_max=1, **priorities, **memory)
    Core(agent, env).learn(n_steps=STEPS, quiet=True, **fit)
    return agent._replay_memory._tree.size

print(f"mushroom-rl {mushroom_rl.__version__}, torch {torch.__version__}, Rainbow with n_steps_return={N}")
runs = {
    "episodes of 100 steps, a fit each step": (stored(100, n_steps_per_fit=1), 0),
    "episodes of 100 steps, a fit each 4 steps": (stored(100, n_steps_per_fit=4), STEPS // 2),
    "episodes of 10 steps, a fit each 10 episodes": (stored(10, n_episodes_per_fit=10), STEPS * 8 // 10),
    "episodes of 2 steps, a fit each 10 episodes": (stored(2, n_episodes_per_fit=10), 0),
}
print(f"rows in the memory after {STEPS:,} steps: expected: {STEPS:,}, but for the last two")
for name, (rows, _) in runs.items():
    print(f"happened: {rows:>5,} ({name})")
sys.exit(0 if all(rows == found for rows, found in runs.values()) else "This is no longer so.")
EOF
