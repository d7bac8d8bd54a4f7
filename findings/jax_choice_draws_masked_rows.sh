#!/usr/bin/env bash
# jax.random.choice with probabilities draws rows whose probability is 0, and of many rows never draws most: it looks a float32
# number with 23 random bits up in a float32 sum. Parallel sums of float32 do not only grow, so that the search may end at a row
# that adds nothing. `mode="high"` changes neither. Where rows are valid or not, draw the number of a valid row with randint
# and look it up in the sum of the mask, which is of integers and exact.
#
# Needs Python 3.12 or newer, and 3 GB of memory.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" -W ignore - << 'EOF'
import sys

import jax
import jax.numpy as jnp
import numpy as np

DRAWS, EPISODE = 20_000_000, 7
print(f"JAX {jax.__version__}, CPU")

def counts(rows, valid, draws, seed=0, **mode):
    p = valid / valid.sum()
    row = jax.random.choice(jax.random.key(seed), rows, (draws,), p=p, **mode)
    return np.bincount(np.asarray(row), minlength=rows)

def exact(rows, valid, draws):
    upto = jnp.cumsum(valid.astype(jnp.int32))
    nth = jax.random.randint(jax.random.key(0), (draws,), 0, upto[-1])
    return np.bincount(np.asarray(jnp.searchsorted(upto, nth, side="right")), minlength=rows)

masked = {}
for rows in (100_000, 1_000_000, 10_000_000):
    valid = jnp.arange(rows) % EPISODE < EPISODE - 1  # no transition begins at the last row of an episode
    ends = ~np.asarray(valid)
    masked[rows] = [int(c[ends].sum()) for c in (counts(rows, valid, DRAWS), counts(rows, valid, DRAWS, mode="high"))]
    assert exact(rows, valid, DRAWS)[ends].sum() == 0
    print(f"{rows:>10,} rows, 1 in {EPISODE} of probability 0; expected: 0 of {DRAWS:,} draws are of these")
    print(f"happened: {masked[rows][0]:,}, and {masked[rows][1]:,} with mode='high'")

rows = 2**25
valid = jnp.ones(rows, bool)
seen = np.zeros(rows, bool)
for seed in range(8):
    seen |= counts(rows, valid, rows // 2, seed) > 0
print(f"{rows:,} rows alike, 4 draws a row; expected: {1 - np.exp(-4):.1%} of the rows were drawn")
print(f"happened: {seen.mean():.1%}")
as_found = all(min(n) > 20 for n in masked.values()) and max(masked[10_000_000]) > 5_000 and seen.mean() < 0.3
sys.exit(0 if as_found else "This is no longer so.")
EOF
