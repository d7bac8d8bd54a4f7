#!/usr/bin/env bash
# SuperSuit's vector environments for Stable-Baselines3 pass limits as ends: done is True, and info["TimeLimit.truncated"],
# which SB3's own vector environments set and its buffers and PPO read, is missing. PettingZoo's environments of a fixed
# number of cycles end in terminal states, from which nothing is bootstrapped. Set the key in a VecEnvWrapper from the
# flags of the inner environments.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet supersuit==3.11.0 pettingzoo==1.27.0 stable-baselines3==2.9.2 gymnasium==1.4.0 \
  torch==2.13.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import numpy as np
import pettingzoo
import supersuit
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv

SPACES = gymnasium.spaces.Box(0, 5, (1,), np.float32), gymnasium.spaces.Discrete(2)

class Clock(gymnasium.Env):
    """Shows the number of steps; a limit of five ends each episode."""

    observation_space, action_space = SPACES

    def reset(self, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, False, self.steps == 5, {}

class Clocks(pettingzoo.ParallelEnv):
    """The same for two agents."""

    metadata = {"name": "clocks"}
    possible_agents = ["first", "second"]
    render_mode = None

    def observation_space(self, agent):
        return SPACES[0]

    def action_space(self, agent):
        return SPACES[1]

    def reset(self, seed=None, options=None):
        self.agents, self.clock = self.possible_agents[:], Clock()
        return tuple({agent: value for agent in self.agents} for value in self.clock.reset())

    def step(self, actions):
        step, agents = self.clock.step(None), self.possible_agents
        self.agents = [] if step[3] else agents[:]
        return *({agent: value for agent in agents} for value in step[:4]), {agent: {} for agent in agents}

def limits(envs):
    """Return how many steps of 40 reached the limit, and how many of these are terminal in batches."""
    model = DQN("MlpPolicy", envs, learning_starts=1000, buffer_size=100, device="cpu")
    model.learn(40)
    buffer = model.replay_buffer
    rows = buffer.sample(500)
    reached = rows.next_observations.ravel() == 5
    return int((buffer.next_observations[: buffer.pos] == 5).sum()), float(rows.dones.ravel()[reached].mean())

names = ("supersuit", "pettingzoo", "stable-baselines3")
print(*(f"{name} {importlib.metadata.version(name)}" for name in names), sep=", ")
expected = limits(DummyVecEnv([Clock, Clock]))
print("expected: {} steps of 40 reach the limit, terminal in batches: {:.0%} (DummyVecEnv)".format(*expected))
envs = supersuit.pettingzoo_env_to_vec_env_v1(Clocks())
happened = limits(supersuit.concat_vec_envs_v1(envs, 1, base_class="stable_baselines3"))
print("happened: {} steps of 40 reach the limit, terminal in batches: {:.0%} (SuperSuit)".format(*happened))
sys.exit(0 if expected == (8, 0) and happened == (8, 1) else "This is no longer so.")
EOF
