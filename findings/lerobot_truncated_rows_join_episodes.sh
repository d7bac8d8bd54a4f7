#!/usr/bin/env bash
# lerobot's ReplayBuffer with optimize_memory=True, as its learner for HIL-SERL makes it, returns the state of the next row
# as next_state also where an episode was truncated: the first state of the next episode, with done 0, so that the target
# bootstraps from there. In a full buffer the newest row is followed by the oldest. Saving as a data set, as the learner
# does, loses the truncations: a loaded buffer has none. Pass optimize_memory=False, or end episodes by termination.
#
# Needs Python 3.12 or newer, and 6 GB of disk, most of them for torch's CUDA.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lerobot[dataset]==0.6.1 torch==2.11.0 torchvision==0.26.0 gymnasium==1.4.0 numpy==2.2.6
cd "$work"
HF_HUB_OFFLINE=1 HF_HOME="$work/home" HF_DATASETS_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import logging
import sys

logging.disable(logging.WARNING)
import gymnasium
import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.rl.buffer import ReplayBuffer

KEY = "observation.state"
STEPS, EPISODES = 200, 10  # Pendulum ends by its time limit alone

def filled(capacity, optimize_memory):
    """Return a buffer of episodes, and the next observation of each state."""
    buffer = ReplayBuffer(capacity, device="cpu", state_keys=[KEY], use_drq=False, optimize_memory=optimize_memory)
    env, after = gymnasium.make("Pendulum-v1"), {}
    env.action_space.seed(0)
    for episode in range(EPISODES):
        state, truncated = env.reset(seed=episode)[0], False
        while not truncated:
            action = env.action_space.sample()
            following, reward, terminated, truncated, _ = env.step(action)
            states = ({KEY: torch.tensor(x)[None]} for x in (state, following))
            old, new = states
            buffer.add(old, torch.tensor(action)[None], float(reward), new, done=terminated, truncated=truncated)
            after[state.tobytes()], state = following, following
    return buffer, after

def drawn(buffer, after):
    """Return which of many sampled rows are truncated, are done, and have another next state than the environment gave."""
    batches = [buffer.sample(256) for _ in range(100)]
    truncated, done = (torch.cat([b[name] for b in batches]).numpy() > 0 for name in ("truncated", "done"))
    rows = [(s.numpy(), n.numpy()) for b in batches for s, n in zip(b["state"][KEY], b["next_state"][KEY])]
    wrong = np.array([not np.array_equal(after[s.tobytes()], n) for s, n in rows])
    return truncated, done, wrong

torch.manual_seed(0)
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("lerobot", "torch", "gymnasium")), sep=", ")
print("next states of truncated rows; expected: the last observation of the episode, or that these rows are not drawn")
share = {}
for optimize_memory in (False, True):
    truncated, done, wrong = drawn(*filled(10_000, optimize_memory))
    share[optimize_memory] = wrong[truncated].mean()
    print(
        f"happened: optimize_memory={optimize_memory}: {share[optimize_memory]:.0%} of {truncated.sum()} are of another "
        f"episode, of which {done[truncated].sum()} are done; of the other rows {wrong[~truncated].mean():.0%}"
    )
full, after = filled(STEPS * EPISODES - 50, True)
truncated, done, wrong = drawn(full, after)
print(f"happened: in a full buffer: {wrong[truncated].mean():.0%}")

saved = filled(10_000, True)[0]
saved.to_lerobot_dataset("me/pendulum", root="saved")
data = LeRobotDataset("me/pendulum", root="saved")
loaded = ReplayBuffer.from_lerobot_dataset(data, "cpu", [KEY], 10_000, use_drq=False, optimize_memory=True)
count = [int(b.truncateds[: len(b)].sum()) for b in (saved, loaded)]
print(f"truncated rows, saved as a data set and loaded; expected: {count[0]}")
print(f"happened: {count[1]}, and {int(loaded.dones[: len(loaded)].sum())} done")
stale = share == {False: 0, True: 1} and wrong[truncated].all() and not done.any() and count == [EPISODES, 0]
sys.exit(0 if stale else "This is no longer so.")
EOF
