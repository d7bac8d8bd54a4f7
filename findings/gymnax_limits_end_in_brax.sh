#!/usr/bin/env bash
# gymnax's GymnaxToBraxWrapper reports a time limit as info["truncated"]; brax's wrappers and agents read info["truncation"],
# which stays 0, so each limit of gymnax is a terminal state to them. All episodes start in one state, for brax's
# AutoResetWrapper replaces the states that gymnax draws; without it, which gymnax's documentation calls redundant,
# EpisodeWrapper never counts from 0 again, and every step after the first episode is done. Pass an episode_length below
# max_steps_in_episode, and keep AutoResetWrapper.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 flax==0.12.8 numpy==2.4.6 scipy==1.17.1 trimesh==5.2.0 absl-py==2.5.1 \
  etils==1.15.0 jaxopt==0.8.5 gymnasium==1.3.0 matplotlib==3.11.2 seaborn==0.13.2 six==1.17.0
"$work/venv/bin/pip" install --quiet --no-deps gymnax==1.0.1 brax==0.14.2 mujoco==3.10.0 mujoco-mjx==3.10.0
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gymnax
import jax
import jax.numpy as jnp
from brax.envs.wrappers import training
from gymnax.wrappers.brax import GymnaxToBraxWrapper

env, params = gymnax.make("Pendulum-v1")
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("gymnax", "brax", "jax")), sep=", ")

def ends(wrapped):
    """The steps of 450 that are done, with brax's flag, and the number of different first observations."""
    state = jax.jit(wrapped.reset)(jax.random.split(jax.random.PRNGKey(0), 2))
    first, done, step = {tuple(state.obs[0].tolist())}, [], jax.jit(wrapped.step)
    for number in range(1, 451):
        state = step(state, jnp.zeros((2, 1)))
        if state.done[0]:
            done.append((number, int(state.info["truncation"][0])))
            first.add(tuple(state.obs[0].tolist()))
    return done, len(first)

limit = params.max_steps_in_episode
done, starts = ends(training.wrap(GymnaxToBraxWrapper(env), episode_length=1000))
shorter, _ = ends(training.wrap(GymnaxToBraxWrapper(env), episode_length=limit - 1))
print(f"Pendulum has no terminal states and a limit of {limit} steps: ends, and the flag of truncation")
print("expected: [(200, 1), (400, 1)], from three first states")
print(f"happened: {done}, from {starts} first states; with an episode_length of {limit - 1}: {shorter}")
alone, _ = ends(training.EpisodeWrapper(training.VmapWrapper(GymnaxToBraxWrapper(env)), limit, 1))
print(f"without AutoResetWrapper: expected: 2 ends; happened: {len(alone)}, from step {alone[0][0]} on")
same = done == [(200, 0), (400, 0)] and starts == 1 and shorter == [(199, 1), (398, 1)]
sys.exit(0 if same and len(alone) == 251 else "This is no longer so.")
EOF
