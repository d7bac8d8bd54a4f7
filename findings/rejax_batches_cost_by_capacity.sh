#!/usr/bin/env bash
# rejax draws batches without replacement by `jax.random.choice` with probabilities, which makes a random number for every slot
# of the buffer, empty ones too, and takes the largest. So a batch costs by the capacity, whatever is drawn or held: of a
# million slots 8 ms, as long as many a step of training. `jax.random.randint(rng, (256,), 0, buffer.num_entries)` takes 0.1
# ms; it draws some row twice in 3 of 100 batches of 256 from a million.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 chex==0.1.92 distrax==0.1.8 optax==0.2.8 \
  gymnax==1.0.1 pyyaml==6.0.3 numpy==2.4.6
"$work/venv/bin/pip" install --quiet --no-deps rejax==0.1.3
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys
import time

import jax
import jax.numpy as jnp
from gymnax.environments import spaces
from rejax.buffers import Minibatch, ReplayBuffer

BATCH, HELD = 256, 5_000
print(f"rejax {importlib.metadata.version('rejax')}, JAX {jax.__version__}, a batch of {BATCH} of {HELD:,} rows of 4 floats")

def seconds(draw, key, repeats=7):
    jax.block_until_ready(draw(key))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(draw(key))
        times.append(time.perf_counter() - begin)
    return min(times)

def replaced(buffer, key):
    slot = jax.random.randint(key, (BATCH,), 0, buffer.num_entries)
    return jax.tree.map(lambda leaf: leaf[slot], buffer.data)

took = {}
for capacity in (10_000, 1_000_000):
    buffer = ReplayBuffer.empty(capacity, spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2))
    obs = jnp.ones((HELD, 4))
    buffer = buffer.extend(Minibatch(obs, jnp.zeros(HELD, jnp.int32), jnp.ones(HELD), jnp.zeros(HELD, bool), obs))
    random = jax.jit(replaced)
    draws = (lambda key: buffer.sample(BATCH, key)), (lambda key: random(buffer, key))
    took[capacity] = tuple(seconds(draw, jax.random.key(0)) for draw in draws)
print("expected: the capacity does not matter, as 5,000 rows are held in both")
for capacity, (theirs, other) in took.items():
    print(f"happened with {capacity:>9,} slots: {1e3 * theirs:.2f} ms; with replacement {1e3 * other:.2f} ms")
small, large = took.values()
sys.exit(0 if large[0] > 10 * small[0] and large[1] < 5 * small[1] else "This is no longer so.")
EOF
