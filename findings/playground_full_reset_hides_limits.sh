#!/usr/bin/env bash
# mujoco_playground's wrap_for_brax_training(full_reset=True) replaces info by that of the reset where an episode ends,
# info["truncation"] and info["episode_metrics"] included. The step that reaches the limit says done and no truncation,
# so each time limit is a terminal state to brax's PPO and SAC, and episode metrics are 0. Only
# info["AutoResetWrapper_preserve_info"] is kept: an inner wrapper may write truncation and final observation into it.
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet playground==0.2.0 brax==0.14.2 mujoco==4.0.0 mujoco-mjx==3.17.0 warp-lang==1.19.0 \
  flax==0.12.12 jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
from mujoco_playground import registry, wrapper

LIMIT = 8
env = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})

def ends(full_reset):
    """Return done, truncation and the rewards of the episode by the metrics, at the first limit of an environment."""
    envs = wrapper.wrap_for_brax_training(env, episode_length=LIMIT, full_reset=full_reset)
    state, step = jax.jit(envs.reset)(jax.random.split(jax.random.PRNGKey(0), 1)), jax.jit(envs.step)
    for _ in range(LIMIT):
        state = step(state, jnp.zeros((1, env.action_size)))
    total = state.info["episode_metrics"]["sum_reward"]
    return [round(float(value[0]), 1) for value in (state.done, state.info["truncation"], total)]

names = ("playground", "brax", "mujoco-mjx", "jax")
print(*(f"{name} {importlib.metadata.version(name)}" for name in names), sep=", ")
expected, happened = ends(full_reset=False), ends(full_reset=True)
print(f"done, truncation and rewards of an episode at a limit of {LIMIT} steps")
print(f"expected: {expected} (full_reset=False)")
print(f"happened: {happened} (full_reset=True)")
sys.exit(0 if expected[:2] == [1, 1] and expected[2] > 1 and happened == [1, 0, 0] else "This is no longer so.")
EOF
