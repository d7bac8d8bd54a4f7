#!/usr/bin/env bash
# brax's replay queues store a row as one vector, in the dtype that its leaves have in common. One float in the row makes
# frames of uint8 four times as large, and rounds integers beyond 16.7 million (counters of steps, seeds, keys): what is
# sampled has the old dtype and other values. Use a queue for each dtype: with equal keys they draw the same rows.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 flax==0.12.8 numpy==2.4.6 trimesh==5.2.0 scipy==1.17.1 absl-py==2.5.1 etils==1.15.0
"$work/venv/bin/pip" install --quiet --no-deps brax==0.14.2 mujoco==3.10.0 mujoco-mjx==3.10.0
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np
from brax.training.replay_buffers import UniformSamplingQueue

CAPACITY, ROWS, START = 1000, 100, 20_000_000
print(f"brax {importlib.metadata.version('brax')}, jax {jax.__version__}")

def queue(**leaves):
    row = {"frame": jnp.zeros((84, 84), jnp.uint8), "step": jnp.int32(0), "key": jnp.zeros(2, jnp.uint32)} | leaves
    buffer = UniformSamplingQueue(CAPACITY, row, 64)
    return buffer, buffer.init(jax.random.key(0))

rows = {
    "frame": jnp.zeros((ROWS, 84, 84), jnp.uint8),
    "step": START + jnp.arange(ROWS, dtype=jnp.int32),
    "key": jax.random.key_data(jax.random.split(jax.random.key(1), ROWS)),
    "reward": jnp.zeros(ROWS),
}
buffer, state = queue(reward=jnp.float32(0))
megabytes, expected = state.data.nbytes / 1e6, CAPACITY * (84 * 84 + 4 + 8 + 4) / 1e6
print(f"1,000 rows of a frame, a step, a key and a reward: expected {expected:.1f} MB; happened: {megabytes:.1f} MB ({state.data.dtype})")

state, batch = buffer.sample(buffer.insert(state, rows))
odd = int((batch["step"] % 2 == 1).sum())
known = {tuple(key) for key in np.asarray(rows["key"]).tolist()}
keys = sum(tuple(key) in known for key in np.asarray(batch["key"]).tolist())
print(f"64 of the steps from 20,000,000 to 20,000,099: expected: about 32 odd; happened: {odd} ({batch['step'].dtype})")
print(f"64 of 100 keys: expected: 64 that were stored; happened: {keys} ({batch['key'].dtype})")
sys.exit(0 if megabytes > 3.9 * expected and odd == keys == 0 else "This is no longer so.")
EOF
