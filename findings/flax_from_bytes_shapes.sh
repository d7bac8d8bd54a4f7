#!/usr/bin/env bash
# flax.serialization.from_bytes compares the names of the leaves with its template, but neither their shapes nor their
# dtypes. A buffer of 8 rows loads into a template of 16 without a word, and JAX then drops each write to rows 8 to 15,
# also without a word. Compare jax.tree.map(jnp.shape, ...) and the dtypes after loading.
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet flax==0.12.12 jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import sys

import flax
import jax
import jax.numpy as jnp
from flax import serialization

def buffer(capacity, dtype):
    return {"rows": jnp.zeros((capacity, 2), dtype), "cursor": jnp.int32(0)}

@jax.jit
def add(state, row):
    rows = state["rows"].at[state["cursor"]].set(row.astype(state["rows"].dtype))
    return {"rows": rows, "cursor": state["cursor"] + 1}

print(f"flax {flax.__version__}, jax {jax.__version__}")
saved = serialization.to_bytes(buffer(8, jnp.float32))
template = buffer(16, jnp.bfloat16)
state = serialization.from_bytes(template, saved)
rows = state["rows"]
print("template: bfloat16[16, 2]; saved: float32[8, 2]")
print("expected: an error that names the leaf")
print(f"happened: loaded as {rows.dtype}{list(rows.shape)}")

for value in range(1, 13):
    state = add(state, jnp.full(2, value))
kept = state["rows"][:, 0].tolist()
print(f"twelve rows added to it: expected 1 to 12; happened: {kept}, cursor {state['cursor']}")
sys.exit(0 if rows.shape == (8, 2) and rows.dtype == jnp.float32 and kept == [*range(1, 9)] else "This is no longer so.")
EOF
