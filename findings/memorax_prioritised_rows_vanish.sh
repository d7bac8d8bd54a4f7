#!/usr/bin/env bash
# Each add to memorax's prioritised episode buffer sets the priorities of the rows before the write position to 0, not of those
# after it, which it overwrites. If adds are shorter than the windows (its R2D2 adds single steps), no whole window has a
# priority, and every batch is the fallback: windows from the first slot of each environment, also after set_priorities. Of
# longer adds the last rows, one fewer than in a window, are lost. make_episode_buffer, without priorities, draws all.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet memorax==1.0.1 flashbax==0.1.3 gymnax==1.0.1 jax==0.10.2 numpy==2.4.6
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from memorax.buffers import make_episode_buffer, make_prioritised_episode_buffer

LANES, EPISODES, STEPS, WINDOW = 4, 20, 50, 20

class Row(NamedTuple):
    step: jax.Array  # of its lane, counted through all episodes
    prev_done: jax.Array

def episodes_drawn(make, steps_per_add):
    """Return the episodes of which a window was drawn after all were added, with a draw and new priorities after each add."""
    buffer = make(
        max_length=LANES * 2 * EPISODES * STEPS,
        min_length=LANES * WINDOW,
        sample_batch_size=64,
        sample_sequence_length=WINDOW,
        add_sequences=True,
        add_batch_size=LANES,
    )

    def step(state, start):
        number = jnp.tile(start + jnp.arange(steps_per_add), (LANES, 1))
        state = buffer.add(state, Row(number, number % STEPS == 0))
        if make is make_prioritised_episode_buffer:
            batch = buffer.sample(state, jax.random.key(start))
            error = jax.random.uniform(jax.random.key(-start), (64,), minval=0.5)
            learnt = buffer.set_priorities(state, batch.indices, error)
            state = jax.tree.map(lambda a, b: jnp.where(buffer.can_sample(state), a, b), learnt, state)
        return state, None

    state = buffer.init(Row(jnp.int32(0), jnp.bool_(False)))
    state = jax.lax.scan(step, state, jnp.arange(0, EPISODES * STEPS, steps_per_add))[0]
    keys = jax.random.split(jax.random.key(0), 100)
    first = jax.vmap(lambda key: buffer.sample(state, key).experience.step[:, 0])(keys)
    return sorted({int(x) // STEPS for x in np.unique(first)})

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("memorax", "flashbax", "jax")), sep=", ")
print(f"{EPISODES} episodes of {STEPS} steps in each of {LANES} environments, 6,400 windows of {WINDOW} steps drawn")
print(f"expected: episodes {list(range(EPISODES))}, or nearly all")
drawn = {}
for make in (make_episode_buffer, make_prioritised_episode_buffer):
    for steps_per_add in (1, 10):
        case = make.__name__, steps_per_add
        drawn[case] = episodes_drawn(make, steps_per_add)
        print(f"happened: {case[0]}, {steps_per_add:>2} steps an add: episodes {drawn[case]}")
plain, prioritised = ([d for (name, _), d in drawn.items() if ("prio" in name) == kind] for kind in (False, True))
as_found = all(d == list(range(EPISODES)) for d in plain) and prioritised == [[0], [0]]
sys.exit(0 if as_found else "This is no longer so.")
EOF
