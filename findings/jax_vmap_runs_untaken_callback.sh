#!/usr/bin/env bash
# Under vmap, a side effect in a branch of lax.cond runs for every element, also where the predicate is False: the
# conditional becomes a selection. io_callback is refused there with an error, but buffer_callback(has_side_effect=True)
# with a vmap_method is not: a store that writes rows "if the lane is alive" writes those of all lanes. Pass the
# predicate to the callback instead.
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
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

SLOT = jax.ShapeDtypeStruct((), jnp.int32)
written = []

def write(context, out, row):
    written.append(int(np.asarray(row)))
    np.asarray(out)[...] = 0

def with_buffer(row):
    return buffer_callback(write, SLOT, has_side_effect=True, vmap_method="sequential")(row)

def with_io(row):
    return io_callback(lambda row: np.int32(0), SLOT, row)

def add(alive, row, store):
    return jax.lax.cond(alive, store, lambda row: jnp.int32(-1), row)

print(f"jax {jax.__version__}")
alive, rows = jnp.array([False, True, False]), jnp.array([10, 11, 12])
for lane in range(3):
    jax.block_until_ready(jax.jit(lambda a, r: add(a, r, with_buffer))(alive[lane], rows[lane]))
one_by_one, written[:] = written[:], []
slots = jax.jit(jax.vmap(lambda a, r: add(a, r, with_buffer)))(alive, rows).tolist()
try:
    jax.jit(jax.vmap(lambda a, r: add(a, r, with_io)))(alive, rows)
    refused = False
except NotImplementedError:
    refused = True

print(f"rows written lane by lane: {one_by_one}")
print("expected with vmap: the same, or an error, as io_callback raises")
print(f"happened: {written} written, returned {slots}; io_callback refused: {refused}")
sys.exit(0 if one_by_one == [11] and sorted(written) == [10, 11, 12] and refused else "This is no longer so.")
EOF
