#!/usr/bin/env bash
# jax.export keeps donate_argnums out of what the exported function does when it is called: exported.call copies the
# whole buffer in each call, and keeps the old one alive. Wrap it once more, jax.jit(exported.call, donate_argnums=0),
# and it updates in place. It hurts a program that ships a compiled `add`: twice the memory, and time that grows with the
# capacity, with right results.
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.12.0.1 numpy==2.5.5 flatbuffers==25.12.19
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import sys

import jax
import jax.numpy as jnp
from jax import export

def add(rows, row):
    return rows.at[3].set(row)

def in_place(function):
    rows = jnp.zeros((1 << 18, 16))  # 16 MB
    for _ in range(2):
        old, address = rows, rows.unsafe_buffer_pointer()
        rows = function(rows, jnp.ones(16))
    return rows.unsafe_buffer_pointer() == address and old.is_deleted()

print(f"jax {jax.__version__}")
donating = jax.jit(add, donate_argnums=0)
shapes = jax.ShapeDtypeStruct((1 << 18, 16), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.float32)
exported = export.deserialize(export.export(donating)(*shapes).serialize())
happened = [in_place(f) for f in (donating, exported.call, jax.jit(exported.call, donate_argnums=0))]
print("updates in place: jitted, exported from it, exported and jitted again")
print(f"expected: {[True, True, True]}")
print(f"happened: {happened}")
sys.exit(0 if happened == [True, False, True] else "This is no longer so.")
EOF
