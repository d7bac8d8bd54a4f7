#!/usr/bin/env bash
# The n-step windows of memmap-replay-buffer end before the last step of an episode, whose state they return as the next one: its
# reward and its flag `done` are in no window, and those at the end are as if the episode went on. Store a further step after
# the last one, with the final state. A full buffer that is not circular refuses episodes after it has overwritten the first
# one with them; `store` overwrites it without an error. Look at `num_episodes` before storing.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 memmap-replay-buffer==0.2.3
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import numpy as np
import torch
from memmap_replay_buffer import ReplayBuffer

EPISODES, LENGTH, N = 50, 10, 3
FIELDS = {"state": "float", "reward": "float", "done": "bool"}
print(f"memmap-replay-buffer {importlib.metadata.version('memmap-replay-buffer')}, torch {torch.__version__}")

def episode(number):
    """Return the fields of an episode whose reward comes with its last step."""
    last = np.arange(LENGTH) == LENGTH - 1
    return {"state": np.float32(1 + number) + np.zeros(LENGTH, np.float32), "reward": last.astype(np.float32), "done": last}

buffer = ReplayBuffer("windows", max_episodes=EPISODES, max_timesteps=LENGTH, fields=FIELDS)
for number in range(EPISODES):
    buffer.store_episode(**episode(number))
flags = {"current_fields": ("state",), "next_fields": ("state",), "sequence_fields": ("reward", "done")}
batches = list(buffer.dataloader(batch_size=64, n_steps=N, **flags))
windows = sum(len(batch["state"]) for batch in batches)
rewards, ends = (int(sum(batch[name].sum() for batch in batches)) for name in ("seq_reward", "seq_done"))
print(f"{EPISODES} episodes of {LENGTH} steps with a reward at their ends, all windows of {N} steps")
print(f"expected: {EPISODES * LENGTH} windows, {EPISODES * N} of which have the reward and the end")
print(f"happened: {windows} windows, {rewards} of which have the reward, {ends} the end")

full = ReplayBuffer("full", max_episodes=3, max_timesteps=LENGTH, fields=FIELDS, circular=False)
for number in range(3):
    full.store_episode(**episode(number))
before = full.get_all_data()["state"][:, 0].tolist()
try:
    full.store_episode(**episode(10))
except ValueError as error:
    print(f"a fourth episode in a buffer of three: {str(error)[:36]}")
refused = full.get_all_data()["state"][:, 0].tolist()
silent = ReplayBuffer("silent", max_episodes=3, max_timesteps=LENGTH, fields=FIELDS, circular=False)
for number in range(3):
    silent.store_episode(**episode(number))
silent.store(state=12.0, reward=0.0, done=False)
stored = silent.get_all_data()["state"][:, 0].tolist()
print(f"expected: the episodes {before}, with store_episode and with store")
print(f"happened: the episodes {refused} and {stored}")
as_found = rewards == ends == 0 and windows == EPISODES * (LENGTH - 1) and refused[0] == 11 and stored[0] == 12
sys.exit(0 if as_found else "This is no longer so.")
EOF
