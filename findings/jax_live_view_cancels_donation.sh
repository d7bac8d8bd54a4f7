#!/usr/bin/env bash
# While a NumPy view of a JAX array on the CPU is alive (np.asarray), donating that array is refused without a warning:
# the jitted update copies the buffer and leaves the old one valid. A plot, a log or a queue that keeps one view of a
# replay buffer of 10 GB makes each add copy 10 GB. Keep np.array(view) instead, or views of batches only.
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
import warnings

import jax
import jax.numpy as jnp
import numpy as np

warnings.simplefilter("error")
add = jax.jit(lambda rows, slot: rows.at[slot].set(1.0), donate_argnums=0)

def step(rows):
    address = rows.unsafe_buffer_pointer()
    new = add(rows, 3)
    return new, new.unsafe_buffer_pointer() == address and rows.is_deleted()

print(f"jax {jax.__version__}, numpy {np.__version__}")
rows, _ = step(jnp.zeros((1 << 20, 16)))  # 64 MB
rows, without = step(rows)
row = np.asarray(rows)[3]  # one row of 64 bytes keeps the whole view alive
rows, held = step(rows)
row = np.array(np.asarray(rows)[3])
rows, copied = step(rows)
print("updated in place: no view, a view of one row is held, a copy of the row is held")
print(f"expected: {[True, True, True]}, or a warning")
print(f"happened: {[without, held, copied]}, no warning")
sys.exit(0 if [without, held, copied] == [True, False, True] else "This is no longer so.")
EOF
