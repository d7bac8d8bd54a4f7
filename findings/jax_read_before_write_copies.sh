#!/usr/bin/env bash
# A donated buffer that is read and then written at other rows in one jit is copied whole on the CPU, although input and
# output share their memory and the address stays the same. Writing before reading is in place. Order a step as add,
# then sample, and look at memory_analysis().temp_size_in_bytes: neither the address nor alias_size_in_bytes shows the
# copy.
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

BUFFER = jax.ShapeDtypeStruct((1 << 20, 16), jnp.float32)  # 67 MB
ROWS = jax.ShapeDtypeStruct((32, 16), jnp.float32)
INDEX = jax.ShapeDtypeStruct((256,), jnp.int32)

def sample_then_add(buffer, rows, slot, index):
    batch = buffer[index]
    return buffer.at[slot + jnp.arange(32)].set(rows), batch

def add_then_sample(buffer, rows, slot, index):
    buffer = buffer.at[slot + jnp.arange(32)].set(rows)
    return buffer, buffer[index]

print(f"jax {jax.__version__}, buffer 67 MB, donated")
print("expected: temporary memory of a few rows for both orders")
temporary = []
for step in (sample_then_add, add_then_sample):
    compiled = jax.jit(step, donate_argnums=0).lower(BUFFER, ROWS, jax.ShapeDtypeStruct((), jnp.int32), INDEX).compile()
    memory = compiled.memory_analysis()
    temporary.append(memory.temp_size_in_bytes / 1e6)
    shared = memory.alias_size_in_bytes / 1e6
    print(f"happened: {step.__name__}: {shared:.0f} MB shared by input and output, {temporary[-1]:.1f} MB temporary")
sys.exit(0 if temporary[0] > 67 and temporary[1] < 1 else "This is no longer so.")
EOF
