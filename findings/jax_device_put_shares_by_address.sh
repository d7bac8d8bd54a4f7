#!/usr/bin/env bash
# On the CPU jax.device_put of a NumPy array shares its memory if its address happens to be a multiple of 64, and copies
# it otherwise; may_alias=False does not change that. Frames that are put from one reused staging array (shared memory
# of vectorised environments, a decoder's output) come out as rows that all show the last frame, for some sizes and in
# some runs. jnp.array copies always.
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import sys

import jax
import jax.numpy as jnp
import numpy as np

def staging(offset):
    memory = np.zeros(84 * 84 + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + 84 * 84].reshape(84, 84)

def rows(put, offset):
    frame, kept = staging(offset), []
    for step in range(4):
        frame[:] = step  # as an environment writes its next observation
        kept.append(put(frame))
        kept[-1].block_until_ready()
    return [int(row[0, 0]) for row in kept]

puts = {
    "jax.device_put": jax.device_put,
    "jax.device_put(may_alias=False)": lambda frame: jax.device_put(frame, may_alias=False),
    "jnp.array": jnp.array,
}
print(f"jax {jax.__version__}, numpy {np.__version__}")
print("expected: frames [0, 1, 2, 3], whatever the address")
happened = {}
for name, put in puts.items():
    happened[name] = rows(put, 0), rows(put, 16)
    print(f"happened: address 64 n: {happened[name][0]}, 64 n + 16: {happened[name][1]} ({name})")
right, last = [0, 1, 2, 3], [3, 3, 3, 3]
as_found = [*happened.values()] == [(last, right), (last, right), (right, right)]
sys.exit(0 if as_found else "This is no longer so.")
EOF
