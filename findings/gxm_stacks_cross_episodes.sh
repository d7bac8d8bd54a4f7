#!/usr/bin/env bash
# gxm's StackObservations keeps the frames of the last episode: it does not look at the ends, after which environments reset
# themselves, so that the first stacks of each episode, one fewer than frames in a stack, mix two episodes. Its environments of
# Gymnasium ignore the key: every run starts with the same states. Stack in the program, where `timestep.done` begins a new
# stack, or in the replay buffer.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet gxm==0.4.0 gymnasium==1.4.0 jax==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import gxm
import jax
import numpy as np
from gxm.wrappers.stack_observations import StackObservations

LANES, STEPS, FRAMES = 4, 500, 4

def rollout(env, seed):
    """Return the observations [STEPS + 1, LANES, ...] of a run with random actions, and where episodes begin."""
    init_key, actions_key = jax.random.split(jax.random.key(seed))
    state, first = jax.vmap(env.init)(jax.random.split(init_key, LANES))

    def step(state, key):
        action = jax.random.randint(key, (LANES,), 0, 2)
        state, timestep = jax.vmap(env.step)(jax.random.split(key, LANES), state, action)
        return state, (timestep.next_obs, timestep.done)

    _, (obs, done) = jax.lax.scan(step, state, jax.random.split(actions_key, STEPS))
    # Gymnasium's vector environments return the final observation, and the first of an episode in the step after it
    begins = np.concatenate([np.ones((1, LANES), bool), np.zeros((1, LANES), bool), np.asarray(done)[:-1]])
    return np.concatenate([np.asarray(first.next_obs)[None], np.asarray(obs)]), begins

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("gxm", "gymnasium", "jax")), sep=", ")
env = gxm.make("Gymnasium/CartPole-v1")
obs, begins = rollout(env, seed=0)
stacks, _ = rollout(StackObservations(env, FRAMES), seed=0)
age = np.zeros(begins.shape, int)
for t in range(1, STEPS + 1):
    age[t] = np.where(begins[t], 0, age[t - 1] + 1)
mixed, episodes = 0, int(begins[1:].sum())
for t, lane in np.ndindex(begins.shape):
    want = [obs[t - min(back, age[t, lane]), lane] for back in reversed(range(FRAMES))]
    mixed += not np.array_equal(stacks[t, lane], want)
print(f"stacks of {FRAMES} frames in {stacks[:, :, 0, 0].size} steps, {episodes} of which begin another episode")
print("expected: 0 stacks have frames of the episode before")
print(f"happened: {mixed}")

starts = {rollout(env, seed)[0][0].tobytes() for seed in range(5)}
print("first states of runs with 5 keys; expected: 5")
print(f"happened: {len(starts)}")
# the last episode of a lane may have begun in its last steps
as_found = (FRAMES - 1) * (episodes - LANES) < mixed <= (FRAMES - 1) * episodes and len(starts) == 1
sys.exit(0 if as_found else "This is no longer so.")
EOF
