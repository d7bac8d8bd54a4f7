#!/usr/bin/env bash
# Minari's DataCollector keeps references to observations, actions and infos until the episode ends, and writes them then.
# An environment that returns its state array and changes it in place, or a policy that writes actions into one array,
# leaves a data set whose rows all equal the last of their episode, with the right rewards. Return copies, or copy in
# a StepDataCallback.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet minari[create,hdf5]==0.5.4 pillow==13.0.0 gymnasium==1.4.0 jax==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu MINARI_DATASETS_PATH="$work/data" "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import minari
import numpy as np

class Walk(gymnasium.Env):
    """Adds the action to a position, in place; five steps an episode."""

    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, copy):
        self.position, self.copy = np.zeros(1, np.float32), copy

    def observation(self):
        return self.position.copy() if self.copy else self.position

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position[:], self.steps = 0, 0
        return self.observation(), {}

    def step(self, action):
        self.position += action
        self.steps += 1
        return self.observation(), float(self.position[0]), False, self.steps == 5, {}

def collected(name, copy):
    gymnasium.register(f"Walk{name}-v0", "__main__:Walk", kwargs={"copy": copy}, disable_env_checker=True)
    env = minari.DataCollector(gymnasium.make(f"Walk{name}-v0"))
    action = np.zeros(1, np.float32)
    env.reset(seed=0)
    for step in range(5):
        action[:] = step / 4
        env.step(action.copy() if copy else action)
    data = env.create_dataset(f"walk/{name.lower()}-v0")
    episode = next(data.iterate_episodes())
    return episode.observations.ravel().tolist(), episode.actions.ravel().tolist(), episode.rewards.tolist()

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("minari", "gymnasium")), sep=", ")
expected = [0, 0, 0.25, 0.75, 1.5, 2.5], [0, 0.25, 0.5, 0.75, 1], [0, 0.25, 0.75, 1.5, 2.5]
print("observations, actions and rewards of an episode, in arrays that are written in place")
print("expected: ", *expected)
happened = collected("InPlace", copy=False)
print("happened: ", *happened)
copied = collected("Copied", copy=True)
print("happened: ", *copied, "(with copies)")
sys.exit(0 if happened == ([2.5] * 6, [1.0] * 5, expected[2]) and copied == expected else "This is no longer so.")
EOF
