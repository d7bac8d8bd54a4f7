#!/usr/bin/env bash
# gymnax's GymnaxToGymWrapper is a gymnasium Env that has already reset when it reports an end: what step returns is the
# first observation of an episode that the caller's reset then discards. In a vector environment or any agent's buffer it
# passes for the final observation, from which a truncated episode is bootstrapped. GymnaxToVectorGymWrapper does not say
# how it resets, and gymnasium's RecordEpisodeStatistics leaves out the first step of each episode but the first. The real
# observation is in info["final_observation"].
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 flax==0.12.8 gymnasium==1.3.0 numpy==2.4.6 matplotlib==3.11.2 seaborn==0.13.2 six==1.17.0
"$work/venv/bin/pip" install --quiet --no-deps gymnax==1.0.1
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnasium
import gymnax
import numpy as np
from gymnax.wrappers.gym import GymnaxToGymWrapper, GymnaxToVectorGymWrapper

env, params = gymnax.make("Pendulum-v1")
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("gymnax", "gymnasium", "jax")), sep=", ")

envs = gymnasium.vector.SyncVectorEnv([lambda: GymnaxToGymWrapper(env, params)] * 4)
envs.reset(seed=0)
matching = []
for _ in range(1000):
    observation, _, _, truncated, info = envs.step(np.zeros((4, 1)))
    if truncated.any():
        final = np.stack([np.asarray(leaf) for leaf in info["final_observation"][truncated]])
        matching += np.isclose(observation[truncated], final).all(axis=1).tolist()
print("observations that end an episode: expected: those that gymnax calls final")
print(f"happened: {sum(matching)} of {len(matching)}")

vector = gymnasium.wrappers.vector.RecordEpisodeStatistics(GymnaxToVectorGymWrapper(env, 4, params))
vector.reset(seed=0)
lengths = []
for _ in range(1000):
    info = vector.step(np.zeros((4, 1)))[-1]
    lengths += info["episode"]["l"][:1].tolist() if "episode" in info else []
print(f"lengths of episodes of {params.max_steps_in_episode} steps in RecordEpisodeStatistics: expected: {[200] * 5}")
print(f"happened: {lengths}")
sys.exit(0 if len(matching) == 16 and not any(matching) and lengths == [200] + [199] * 4 else "This is no longer so.")
EOF
