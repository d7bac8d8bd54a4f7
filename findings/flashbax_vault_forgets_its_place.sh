#!/usr/bin/env bash
# flashbax documents that a Vault writes only what is new in a buffer's state. The place up to which it wrote is not stored: once a
# run continues with its state and opens its Vault again, the first write takes the rows from slot 0 on. Rows that were written
# are written again, and behind the end of the ring new ones are left out. Pass the place, as below, in the first write.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet flashbax==0.1.3 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 chex==0.1.92 numpy==2.4.6 \
    tensorstore==0.1.86 typing-extensions==4.16.0
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import contextlib
import importlib.metadata
import io
import sys

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
from flashbax.vault import Vault

CAPACITY = 1000
buffer = flashbax.make_flat_buffer(max_length=CAPACITY, min_length=2, sample_batch_size=1)
add = jax.jit(lambda state, row: buffer.add(state, {"row": row}))

def added(state, first, stop):
    for row in range(first, stop):
        state = add(state, jnp.int32(row))
    return state

def opened(state, name):
    with contextlib.redirect_stdout(io.StringIO()):
        return Vault(vault_name=name, experience_structure=state.experience, vault_uid="0", rel_dir="vaults")

def stored(name, before, after, told):
    """Write the first rows, continue with the state in a Vault that is opened again, and count what it has.

    Returns the number of rows that it has twice, and of those that it does not have.
    """
    state = added(buffer.init({"row": jnp.int32(0)}), 0, before)
    opened(state, name).write(state)
    vault, place = opened(state, name), int(state.current_index)  # another process, with the state of a checkpoint
    state = added(state, before, before + after)
    interval = {"source_interval": (place, int(state.current_index))} if told else {}
    vault.write(state, **interval)
    state = added(state, before + after, before + after + 10)
    vault.write(state)
    rows, counts = np.unique(np.asarray(vault.read().experience["row"]), return_counts=True)
    return int((counts > 1).sum()), before + after + 10 - len(rows)

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("flashbax", "tensorstore", "jax")), sep=", ")
happened, mended = [], []
for before, after in ((300, 50), (900, 250)):
    print(f"a ring of {CAPACITY}: {before} rows, written; the run continues with {after} and 10 more, each written")
    happened.append(stored(f"{before}", before, after, told=False))
    mended.append(stored(f"{before}_told", before, after, told=True))
    print("expected: 0 rows twice, 0 rows missing")
    print("happened: {} rows twice, {} rows missing".format(*happened[-1]))
    print("with source_interval: {} and {}".format(*mended[-1]))
sys.exit(0 if happened == [(300, 0), (0, 100)] and mended == [(0, 0)] * 2 else "This is no longer so.")
EOF
