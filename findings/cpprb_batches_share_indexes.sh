#!/usr/bin/env bash
# The indexes and weights of a batch of cpprb's PrioritizedReplayBuffer are views of memory that the next sample overwrites;
# the rows are not. Whoever draws ahead, or sets priorities a step later, sets those of other rows. Copy both at once:
# {name: numpy.array(leaf) for name, leaf in batch.items()}. (With another batch size the old arrays may name freed memory.)
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet cpprb==11.0.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import importlib.metadata
import sys

import cpprb
import numpy as np

replay = cpprb.PrioritizedReplayBuffer(1000, {"row": {"dtype": np.int64}}, alpha=1.0)
replay.add(row=np.arange(1000), priorities=np.linspace(1, 3, 1000))
print(f"cpprb {importlib.metadata.version('cpprb')}, numpy {np.__version__}")

first = replay.sample(32)
rows, weights = first["row"].ravel().copy(), first["weights"].copy()
assert (first["indexes"] == rows).all()
replay.sample(32)  # the next batch is drawn before the first is used, as a prefetching loop does
wrong = int((first["indexes"] != rows).sum())
print("indexes of a batch once the next is drawn: expected: those of its 32 rows")
print(f"happened: {wrong} of 32 name another row; the rows are {'kept' if (first['row'].ravel() == rows).all() else 'lost'}")
print(f"weights: {int((first['weights'] != weights).sum())} of 32 changed")

replay.update_priorities(first["indexes"], np.full(32, 1e6))  # priorities of the first batch, so it seems
drawn = replay.sample(1000)["row"].ravel()
share = np.isin(drawn, rows).mean()
print("share of the first batch in later draws, with priorities of a million: expected: nearly all")
print(f"happened: {share:.0%}")
sys.exit(0 if wrong > 24 and share < 0.5 else "This is no longer so.")
EOF
