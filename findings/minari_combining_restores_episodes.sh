#!/usr/bin/env bash
# minari.combine_datasets copies whole storages: all episodes that filter_episodes and split_dataset left out are in the new data
# set, which is how a selection would be stored. A training split contains the episodes that it holds out, and two splits of one
# data set contain each episode twice. Write the selection with create_dataset_from_buffers, as below.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet minari[create,hdf5]==0.5.4 pillow==13.0.0 gymnasium==1.4.0 jax==0.10.2 numpy==2.4.6
cd "$work"
MINARI_DATASETS_PATH="$work/datasets" "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer

EPISODES, LENGTH = 10, 5

class Numbered(gymnasium.Env):
    """Episodes of 5 steps; the reward of each step is the number of the episode."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1

    def reset(self, seed=None, options=None):
        self.episode, self.step_number = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.step_number += 1
        return np.zeros(1, np.float32), float(self.episode), self.step_number == LENGTH, False, {}

def numbers(dataset):
    """Return the numbers of the episodes."""
    return sorted(int(episode.rewards[0]) for episode in dataset)

def copied(dataset, name):
    """Store the episodes of a selection as a data set."""
    buffers = [
        EpisodeBuffer(
            observations=episode.observations,
            actions=episode.actions,
            rewards=episode.rewards.tolist(),
            terminations=episode.terminations.tolist(),
            truncations=episode.truncations.tolist(),
        )
        for episode in dataset
    ]
    spaces = dict(observation_space=dataset.observation_space, action_space=dataset.action_space)
    return minari.create_dataset_from_buffers(name, buffers, **spaces)

env = minari.DataCollector(Numbered())
for _ in range(EPISODES):
    env.reset()
    for _ in range(LENGTH):
        env.step(0)
dataset = env.create_dataset("numbered/all-v0")
good = dataset.filter_episodes(lambda episode: episode.rewards.sum() >= EPISODES * LENGTH / 2)
train, held_out = minari.split_dataset(dataset, [7, 3], seed=0)
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("minari", "gymnasium")), sep=", ")
print(f"{EPISODES} episodes, of which {len(good)} are good; {len(train)} to train with and {len(held_out)} held out")
stored = minari.combine_datasets([good], "numbered/good-v0")
training = minari.combine_datasets([train], "numbered/train-v0")
both = minari.combine_datasets([train, held_out], "numbered/both-v0")
leaked = len(set(numbers(training)) & set(numbers(held_out)))
print(f"expected: {len(good)} good episodes are stored; 0 held out ones among those to train with; {EPISODES} of both")
print(f"happened: {len(stored)} episodes; {leaked} held out ones; {len(both)} of both")
right = copied(good, "numbered/copied-v0")
print(f"with create_dataset_from_buffers: {len(right)} episodes")
as_found = (len(stored), leaked, len(both)) == (EPISODES, len(held_out), 2 * EPISODES)
sys.exit(0 if as_found and numbers(right) == numbers(good) else "This is no longer so.")
EOF
