#!/usr/bin/env bash
# With gymnasium's vector environments, which reset in the step after an end since 1.0, skrl stores that step as a transition:
# from the last observation of an episode to the first of the next, with reward 0, not terminal, and an action that
# nothing executed. A task that pays 1 a step for ever, cut by a time limit of 10, is then worth 1 / (1 - gamma) less a
# tenth. (A single environment is reset by skrl itself and is right.) Use wrapped single environments, or drop these rows.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 gymnasium==1.4.0 tqdm==4.70.1 packaging==26.4 tensorboard==2.21.0
"$work/venv/bin/pip" install --quiet --no-deps skrl==2.1.1
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import logging
import sys

import gymnasium
import numpy as np
import skrl
import torch
from skrl.agents.torch.dqn import DQN, DQN_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer, SequentialTrainerCfg

STEPS, LIMIT = 1100, 10
skrl.logger.setLevel(logging.WARNING)

class Constant(gymnasium.Env):
    """A reward of 1 in each step, for ever. An observation is the number of the episode."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = 0

    def reset(self, seed=None, options=None):
        self.episode += 1
        return np.full(1, self.episode, np.float32), {}

    def step(self, action):
        return np.full(1, self.episode, np.float32), 1.0, False, False, {}

class Value(DeterministicMixin, Model):
    def __init__(self, env):
        Model.__init__(self, observation_space=env.observation_space, action_space=env.action_space, device="cpu")
        DeterministicMixin.__init__(self)
        self.layer = torch.nn.Linear(1, 2)

    def compute(self, inputs, role=""):
        return self.layer(inputs["observations"]), {}

def stored(env):
    """The observations, rewards and next observations that a DQN stores."""
    env = wrap_env(env, verbose=False)
    memory = RandomMemory(memory_size=STEPS + 1, num_envs=env.num_envs, device="cpu")
    cfg = DQN_CFG(random_timesteps=2 * STEPS, learning_starts=2 * STEPS)
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    models = {"q_network": Value(env), "target_q_network": Value(env)}
    spaces = dict(observation_space=env.observation_space, action_space=env.action_space)
    agent = DQN(models=models, memory=memory, cfg=cfg, device="cpu", **spaces)
    trainer = SequentialTrainerCfg(timesteps=STEPS, headless=True, disable_progressbar=True)
    SequentialTrainer(cfg=trainer, env=env, agents=agent).train()
    names = "observations", "rewards", "next_observations", "terminated"
    return [memory.get_tensor_by_name(name)[: memory.memory_index].flatten() for name in names]

def make():
    return gymnasium.wrappers.TimeLimit(Constant(), LIMIT)

print(f"skrl {skrl.__version__}, gymnasium {gymnasium.__version__}, torch {torch.__version__}")
print(f"episodes of {LIMIT} steps that a limit cuts, a reward of 1 a step: expected: no row joins two episodes; a mean reward of 1")
happened = {}
for name, env in {"one environment": make(), "SyncVectorEnv of two": gymnasium.vector.SyncVectorEnv([make] * 2)}.items():
    first, reward, following, terminated = stored(env)
    joined = first != following
    happened[name] = len(first), int(joined.sum()), reward.mean().item(), int(terminated[joined].sum())
    rows, number, mean, terminal = happened[name]
    print(f"happened: {number} of {rows:,} rows, {terminal} of them terminal; a mean reward of {mean:.3f} ({name})")
single, vector = happened.values()
right = single[1] == 0 and single[2] == 1
sys.exit(0 if right and vector == (2 * STEPS, 2 * STEPS // (LIMIT + 1), vector[2], 0) and vector[2] < 0.92 else "This is no longer so.")
EOF
