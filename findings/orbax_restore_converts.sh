#!/usr/bin/env bash
# Orbax converts what it restores to the dtype of the template and says nothing where values do not fit: float32 to int8
# wraps 300 to 44 and cuts 1.5 to 1. Shapes and names are compared, dtypes are not, so a replay buffer whose rows
# changed their dtype loads with other values. Compare the dtypes with those of item_metadata before restoring.
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import logging
import os
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

logging.disable(logging.WARNING)
print(f"orbax-checkpoint {ocp.__version__}, jax {jax.__version__}")
path = os.path.abspath("state")
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"reward": jnp.array([1.5, 300.0, -2.0]), "action": jnp.array([7, 511, 70_000])})
    checkpointer.wait_until_finished()
    template = {"reward": jnp.zeros(3, jnp.int8), "action": jnp.zeros(3, jnp.uint8)}
    loaded = {name: values.tolist() for name, values in checkpointer.restore(path, template).items()}
    try:
        checkpointer.restore(path, {"reward": jnp.zeros(2), "action": jnp.zeros(3, jnp.int32)})
        shapes = "no error"
    except ValueError as error:
        shapes = type(error).__name__

print("saved:    reward float32 [1.5, 300.0, -2.0], action int32 [7, 511, 70000]; template: int8, uint8")
print("expected: an error, as for another shape")
print(f"happened: {loaded}; another shape: {shapes}")
as_found = loaded == {"reward": [1, 44, -2], "action": [7, 255, 112]} and shapes == "ValueError"
sys.exit(0 if as_found else "This is no longer so.")
EOF
