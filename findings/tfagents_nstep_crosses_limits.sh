#!/usr/bin/env bash
# TF-Agents' n-step updates (DqnAgent's n_step_update) cut windows from consecutive rows of the buffer. Discounts of 0 end them at
# terminal steps; at a time limit, where the discount stays 1, they go on into the next episode: the last n - 1 windows take its
# rewards and bootstrap from its states. The agent masks windows that start between two episodes, not these. Filter the dataset,
# as below, or use one-step updates; with limits, windows that are shorter are then lost.
#
# Needs Python 3.11.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorflow-cpu==2.15.1 tensorflow-probability==0.23.0 numpy==1.26.4 gym==0.25.2 \
    absl-py==2.5.1 gin-config==0.5.0 cloudpickle==3.1.3 typing-extensions==4.16.0 pillow==13.0.0 pygame==2.6.1
"$work/venv/bin/pip" install --quiet --no-deps tf-agents==0.19.0
cd "$work"
TF_CPP_MIN_LOG_LEVEL=3 "$work/venv/bin/python" -W ignore - << 'EOF'
import sys

import numpy as np
import tensorflow as tf
import tf_agents
from tf_agents.agents.dqn import dqn_agent
from tf_agents.drivers.dynamic_step_driver import DynamicStepDriver
from tf_agents.environments import py_environment, tf_py_environment, wrappers
from tf_agents.networks import sequential
from tf_agents.replay_buffers.tf_uniform_replay_buffer import TFUniformReplayBuffer
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step, trajectory

tf.get_logger().setLevel("ERROR")
STEPS, LENGTH, N, GAMMA, DRAWS = 1000, 10, 3, 0.9, 20_000

class Task(py_environment.PyEnvironment):
    """A reward of 1 a step. Observations are a thousand for each episode and one for each step."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal, self.obs = terminal, np.zeros(1, np.float32)

    def action_spec(self):
        return array_spec.BoundedArraySpec((), np.int32, 0, 1)

    def observation_spec(self):
        return array_spec.ArraySpec((1,), np.float32)

    def _reset(self):
        self.obs = self.obs // 1000 * 1000 + 1000
        return time_step.restart(self.obs)

    def _step(self, action):
        self.obs = self.obs + 1
        if self.terminal and self.obs[0] % 1000 == LENGTH:
            return time_step.termination(self.obs, 1.0)
        return time_step.transition(self.obs, 1.0, 1.0)

def collected(terminal):
    """Return the buffer of a DQN agent with n-step updates that acts at random."""
    env = tf_py_environment.TFPyEnvironment(wrappers.TimeLimit(Task(terminal), LENGTH))
    network = sequential.Sequential([tf.keras.layers.Dense(2)])
    optimizer = tf.keras.optimizers.legacy.Adam()
    agent = dqn_agent.DqnAgent(env.time_step_spec(), env.action_spec(), network, optimizer, n_step_update=N, gamma=GAMMA)
    agent.initialize()
    replay = TFUniformReplayBuffer(agent.collect_data_spec, batch_size=1, max_length=2 * STEPS)
    DynamicStepDriver(env, agent.collect_policy, [replay.add_batch], num_steps=STEPS).run()
    return replay

def drawn(dataset):
    """Return the numbers of the windows that the agent does not mask, and of those that bootstrap from another episode."""
    rows, _ = next(iter(dataset))
    row = trajectory.to_n_step_transition(rows, gamma=GAMMA)
    valid = ~row.time_step.is_last().numpy()
    episode, following = (step.observation.numpy()[valid, 0] // 1000 for step in (row.time_step, row.next_time_step))
    joined = (episode != following) & (row.next_time_step.discount.numpy()[valid] > 0)
    return int(valid.sum()), int(joined.sum())

def whole(rows, _):
    """Whether no row of a window but the last follows the end of an episode."""
    return ~tf.reduce_any(rows.is_boundary()[:-1])

print(f"tf-agents {tf_agents.__version__}, tensorflow {tf.__version__}, windows of {N} steps, episodes of {LENGTH}")
happened = {}
for name, terminal in {"a terminal step": True, "a limit": False}.items():
    replay = collected(terminal)
    windows, happened[terminal] = drawn(replay.as_dataset(sample_batch_size=DRAWS, num_steps=N + 1))
    print(f"episodes end in {name}: expected: 0 windows bootstrap from another episode")
    print(f"happened: {happened[terminal]:,} of {windows:,}, {happened[terminal] / windows:.0%}")
    happened[terminal] /= windows
filtered, joined = drawn(replay.as_dataset(num_steps=N + 1).filter(whole).batch(2000))
print(f"filtered: {joined} of {filtered:,}")
share = (N - 1) / LENGTH
sys.exit(0 if happened[True] == 0 and abs(happened[False] - share) < 0.02 and joined == 0 else "This is no longer so.")
EOF
