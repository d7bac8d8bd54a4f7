#!/usr/bin/env bash
# After a run is taken back to an earlier checkpoint, CheckpointManager.save stores nothing until the run passes the
# newest step on disk. It returns False, without a warning, and restore() without a step still gives the abandoned run.
# Check what save returns, and delete the later steps (or use a new directory) when a run goes on from an earlier one.
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

def open_manager():
    return ocp.CheckpointManager(os.path.abspath("run"))

def save(manager, step, run):
    return manager.save(step, args=ocp.args.StandardSave({"run": jnp.int32(run)}))

with open_manager() as manager:
    for step in (100, 200, 300):
        save(manager, step, 1)

with open_manager() as manager:  # the run diverged after step 100: go on from there
    manager.restore(100, args=ocp.args.StandardRestore({"run": jnp.int32(0)}))
    stored = {step: save(manager, step, 2) for step in (150, 200, 250)}
    manager.wait_until_finished()
    steps = list(manager.all_steps())
    newest = int(manager.restore(None, args=ocp.args.StandardRestore({"run": jnp.int32(0)}))["run"])

print("expected: steps 150, 200 and 250 are stored, or refused with an error; restore() gives run 2")
print(f"happened: save returned {stored}; steps on disk {steps}; restore() gives run {newest}")
sys.exit(0 if not any(stored.values()) and steps == [100, 200, 300] and newest == 1 else "This is no longer so.")
EOF
