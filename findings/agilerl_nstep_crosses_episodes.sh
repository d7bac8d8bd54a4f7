#!/usr/bin/env bash
# agilerl's MultiStepReplayBuffer looks for the end of an episode from the second step of a window on. The last step of
# every episode is stored with rewards, next observation and flag of the next episode: the terminal flag and the end are
# lost. And an end in one environment cuts the windows of all others to fewer steps, while RainbowDQN still discounts by
# gamma ** n. Store single steps in a ReplayBuffer and sum over n at sampling, or n_step=1.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 tensordict==0.13.0 gymnasium==1.4.0 accelerate==1.15.0 lazy-loader==0.6 \
  pydantic==2.14.4 numpy==2.4.6
"$work/venv/bin/pip" install --quiet --no-deps agilerl==2.58.0 agilerl-arena==1.28.0
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import numpy as np
import torch
from agilerl.components import MultiStepReplayBuffer
from agilerl.components.data import Transition
from tensordict import TensorDict

STEPS, N = 2000, 3
print(f"agilerl {importlib.metadata.version('agilerl')}, torch {torch.__version__}, n_step {N}, gamma 1, a reward of 1 a step")

def stored(ends):
    replay = MultiStepReplayBuffer(ends.size, n_step=N, gamma=1.0)
    lanes = ends.shape[1]
    for step, end in enumerate(ends):
        row = np.arange(lanes) * STEPS + step  # the number of the row is its observation
        leaves = {"obs": row, "action": 0 * row, "reward": 0 * row + 1, "next_obs": row + 1, "done": end}
        transition = Transition(**{name: torch.tensor(leaf, dtype=torch.float32) for name, leaf in leaves.items()})
        transition.batch_size = torch.Size([lanes])
        replay.add(transition.to_tensordict())
    return {name: replay.storage[name][: len(replay)].flatten().numpy() for name in ("obs", "reward", "done")}

def compared(ends):
    rows = stored(ends)
    step, lane = (rows["obs"] % STEPS).astype(int), (rows["obs"] // STEPS).astype(int)
    reward, done = np.zeros(len(step)), np.zeros(len(step))
    for ahead in range(N):
        reward += done == 0
        done = np.maximum(done, ends[step + ahead, lane])
    last = ends[step, lane]
    return (rows["done"][last] == 1).mean(), rows["reward"][last].mean(), (rows["reward"] < reward)[~last].mean()

rng = np.random.default_rng(0)
happened = {lanes: compared(rng.random((STEPS, lanes)) < 1 / 50) for lanes in (1, 16)}
print("last steps of episodes of about 50 steps: expected: all terminal, with a return of 1; windows shorter than 3: at ends only")
for lanes, (terminal, reward, short) in happened.items():
    print(f"happened with {lanes:>2} environments: {terminal:.0%} of them terminal, mean return {reward:.2f};", end=" ")
    print(f"{short:.0%} of the other windows too short")
one, many = happened.values()
sys.exit(0 if one[0] < 0.1 and one[1] > 2.9 and one[2] == 0 and many[2] > 0.2 else "This is no longer so.")
EOF
