#!/usr/bin/env bash
# The sum tree of cpprb's PrioritizedReplayBuffer is float32, whatever the number of rows: sums have 24 bits, and a position
# beyond 16.7 million is rounded. In batches of 4,096 of 33,554,432 rows with equal priorities, the odd ones of the newer half
# are 0.03 % of its draws; of 67,108,864 the even ones are never drawn, and some others nine times as often as their
# neighbours. Keep fewer rows a buffer, and sample from several.
#
# Needs Python 3.11 or newer, and 2 GB of memory.
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

print(f"cpprb {importlib.metadata.version('cpprb')}, numpy {np.__version__}")
PART = 2**20

def drawn(rows):
    replay = cpprb.PrioritizedReplayBuffer(rows, {"row": {"dtype": np.uint8}}, alpha=1.0)
    for _ in range(rows // PART):
        replay.add(row=np.zeros(PART, np.uint8), priorities=np.ones(PART))
    assert replay.get_stored_size() == rows
    index = np.concatenate([replay.sample(4096)["indexes"].copy() for _ in range(200)])
    return index, np.bincount(index % 8, minlength=8)

print("equal priorities: expected: each eighth of the rows, by their number modulo 8, is 12.5 % of 819,200 draws")
spread, even = {}, {}
for power in (22, 25, 26):
    index, counts = drawn(2**power)
    newer = index[index >= 2**power // 2]
    spread[power], even[power] = counts.max() / counts.min(), np.mean(newer % 2 == 0)
    print(f"happened with {2**power:,} rows: {counts / len(index) * 100} %".replace("[", "").replace("]", ""))
    print(f"  even rows of the newer half: {even[power]:.3%} of its draws (expected 50 %)")
same = spread[22] < 1.05 and spread[25] > 2 and spread[26] > 8 and even[25] > 0.999 and even[26] < 0.001
sys.exit(0 if same else "This is no longer so.")
EOF
