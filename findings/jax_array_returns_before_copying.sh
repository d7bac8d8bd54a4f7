#!/usr/bin/env bash
# In JAX 0.10.2, the newest for Python 3.11, jnp.array of a large NumPy array whose address is no multiple of 64 returns
# before the copy is made, which another thread does. A caller that then writes the next steps into the array finds them
# in the copy, and the steps that were put are lost. copy=True, may_alias=False and jnp.copy do not help. Call
# block_until_ready() first, or use JAX 0.11.2 or newer, which returns with the copy.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import sys

import jax
import jax.numpy as jnp
import numpy as np

frames = 9000  # 63.5 MB
memory = np.zeros(frames * 84 * 84 + 128, np.uint8)
start = -memory.ctypes.data % 64

def changed(put, offset=16):
    """Return how many of 20 copies show the frame that was written after the call."""
    staging = memory[start + offset :][: frames * 84 * 84].reshape(frames, 84, 84)
    count = 0
    for _ in range(20):
        staging[:] = 1
        rows = put(staging)
        staging[-1] = 2
        count += int(rows[-1, 0, 0]) == 2
    return count

early = {
    "jnp.array": jnp.array,
    "jnp.array(copy=True)": lambda staging: jnp.array(staging, copy=True),
    "jnp.copy": jnp.copy,
    "jax.device_put(may_alias=False)": lambda staging: jax.device_put(staging, may_alias=False),
}
print(f"jax {jax.__version__}, numpy {np.__version__}")
print("expected: 0 of 20 copies show a frame that is written after the call")
happened = {name: changed(put) for name, put in early.items()}
sound = {
    "jnp.array, then block_until_ready": changed(lambda staging: jnp.array(staging).block_until_ready()),
    "jnp.array, address 64 n": changed(jnp.array, offset=0),
}
for name, count in (happened | sound).items():
    print(f"happened: {count} of 20 ({name})")
sys.exit(0 if min(happened.values()) >= 10 and not any(sound.values()) else "This is no longer so.")
EOF
