#!/usr/bin/env bash
# rlberry's prioritized replay returns the row before the one that it draws: the number that its sum tree returns becomes the end of
# a slice, which is not part of it. Importance weights are those of the row that was drawn, and `batch.info["indices"]`
# those of the rows returned: an update lowers the priority of another row, and the row with the large error is drawn again until
# the row after it is drawn. Longer chunks end before the row too. Uniform sampling is right.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet numpy==2.4.6 gymnasium==0.29.1 dill==0.4.1 pandas==3.1.1 scipy==1.17.1 tqdm==4.70.1 \
    pyyaml==6.0.4 docopt==0.6.2 multimethod==1.10 matplotlib==3.11.2 adastop==0.1.3 pygame-ce==2.5.8 moviepy==2.2.1 \
    fdasrsf==2.7.3 gitpython==3.2.1
"$work/venv/bin/pip" install --quiet --no-deps rlberry==0.7.3
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import numpy as np
from rlberry.agents.utils.replay import ReplayBuffer

ROWS, LARGE, BATCH, UPDATES = 1000, 700, 32, 100

def made():
    """Return a buffer whose priorities are 1, and 1,000 of the row LARGE."""
    buffer = ReplayBuffer(2 * ROWS, np.random.default_rng(0), enable_prioritized=True, alpha=1.0, beta=1.0)
    buffer.setup_entry("row", np.int32)
    for row in range(ROWS):
        buffer.append({"row": row})
    priority = np.ones((1, ROWS))
    priority[0, LARGE] = 1000
    buffer.update_priorities(np.arange(ROWS)[None], priority)
    return buffer

print(f"rlberry {importlib.metadata.version('rlberry')}, {ROWS:,} rows, half of the priority is that of row {LARGE}")
batch = made().sample(10_000, 1, "prioritized")
row, weight = batch.data["row"][:, 0], batch.info["weights"]
often = np.bincount(row, minlength=ROWS)
top = int(often.argmax())
print(f"expected: row {LARGE} is half of the draws, with a weight of 0.001; the others have 1")
print(f"happened: row {top} is {often[top] / len(row):.0%} of them, with {weight[row == top].mean():.3f}")
print(f"happened: row {LARGE} is {often[LARGE] / len(row):.1%} of them, with {weight[row == LARGE].mean():.3f}")

learner = made()
seen = 0
for _ in range(UPDATES):
    batch = learner.sample(BATCH, 1, "prioritized")
    inside = (batch.info["indices"] >= 0).all(axis=1)
    seen += int((batch.data["row"][inside] == top).sum())
    learner.update_priorities(batch.info["indices"][inside], np.ones((inside.sum(), 1)))  # all errors are small from now on
print(f"{UPDATES} updates with {BATCH} draws, after which errors are small")
print(f"expected: row {LARGE} is learnt from {BATCH // 2} times, and then as often as others, {UPDATES * BATCH // ROWS} times")
print(f"happened: row {top} is learnt from {seen} times")
as_found = top == LARGE - 1 and 0.45 < often[top] / len(row) < 0.55 and weight[row == top].max() < 0.01 and seen > 100
sys.exit(0 if as_found else "This is no longer so.")
EOF
