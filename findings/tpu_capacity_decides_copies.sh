#!/usr/bin/env bash
# On a TPU v5e the same donated update of small rows is in place at 100,000 and at 1,000,000 rows, but at 250,000 each
# step copies the buffer into another layout: 128 MB of temporary memory for 8 MB of rows, with input and output
# reported as shared. XLA chooses the layout by the capacity. Compile ahead of time (no TPU is needed, as here) and look
# at temp_size_in_bytes for the capacity that you use.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax[tpu]==0.10.2 numpy==2.4.6
cd "$work"
TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 TPU_STDERR_LOG_LEVEL=3 TPU_MIN_LOG_LEVEL=3 TF_CPP_MIN_LOG_LEVEL=3 JAX_PLATFORMS=cpu \
  "$work/venv/bin/python" - << 'EOF'
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

chip = topologies.get_topology_desc("v5e:1x1", "tpu", chips_per_host_bounds=(1, 1, 1)).devices[0]

def shape(dimensions, dtype):
    return jax.ShapeDtypeStruct(dimensions, dtype, sharding=SingleDeviceSharding(chip))

def add(rows, slots, new):
    return rows.at[slots].set(new)

print(f"jax {jax.__version__}, {chip.device_kind}, rows of 6 floats, 32 written at a time, donated")
print("expected: temporary memory that is small, or grows with the capacity")
temporary = {}
for capacity in (100_000, 250_000, 1_000_000):
    shapes = shape((capacity, 6), jnp.float32), shape((32,), jnp.int32), shape((32, 6), jnp.float32)
    lowered = jax.jit(add, donate_argnums=0).trace(*shapes).lower(lowering_platforms=("tpu",))
    memory = lowered.compile().memory_analysis()
    temporary[capacity] = memory.temp_size_in_bytes / 1e6
    shared = memory.alias_size_in_bytes / 1e6
    print(f"happened: {capacity:>9,} rows: {shared:5.1f} MB shared, {temporary[capacity]:6.1f} MB temporary")
few, some, many = temporary.values()
sys.exit(0 if few < 1 and some > 100 and many < 1 else "This is no longer so.")
EOF
