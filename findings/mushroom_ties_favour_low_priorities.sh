#!/usr/bin/env bash
# Where two subtrees of equal sums meet, the sum tree of mushroom-rl's PrioritizedReplayMemory goes to either at random, but
# searches there for the old position. In half of the cases it then runs off the end of the subtree, to its last row,
# whatever that row's priority. If priorities have few values (errors that are clipped, or mostly 0), rows of the lowest are
# 54 % of the draws instead of 35 %, and their importance weights assume 35 %. Add a little noise to the errors.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1 matplotlib==3.11.2 tqdm==4.70.1 \
  opencv-python-headless==5.0.0.93 pygame==2.6.1
"$work/venv/bin/pip" install --quiet --no-deps mushroom-rl==1.10.2
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import sys

import mushroom_rl
import numpy as np
from mushroom_rl.utils.replay_memory import PrioritizedReplayMemory

ROWS = 4096
rng = np.random.default_rng(0)
np.random.seed(0)
print(f"mushroom-rl {mushroom_rl.__version__}, numpy {np.__version__}")

def share_of_low(errors):
    """The share of rows without an error in the draws, and in the sum of priorities."""
    memory = PrioritizedReplayMemory(0, ROWS, alpha=0.6, beta=0.4, epsilon=0.01)
    row = np.zeros(1), np.zeros(1), 0.0, np.zeros(1), False, False
    memory.add([row] * ROWS, np.ones(ROWS))
    memory.update(errors, np.arange(ROWS) + ROWS - 1)  # the indices that get returns are those of the tree
    index = np.concatenate([memory.get(256)[6] for _ in range(400)]) - (ROWS - 1)
    priorities = (np.abs(errors) + 0.01) ** 0.6
    low = errors < 0.5
    return low[index].mean(), priorities[low].sum() / priorities.sum()

sparse = (rng.random(ROWS) < 0.1).astype(float)
runs = {
    "errors of 1 in a tenth of the rows, else 0": share_of_low(sparse),
    "the same with noise of 1e-6": share_of_low(sparse + rng.random(ROWS) * 1e-6),
}
print("share of rows with error 0 in 102,400 draws")
for name, (share, expected) in runs.items():
    print(f"expected {expected:.1%}; happened: {share:.1%} ({name})")
(tied, expected), (noisy, _) = runs.values()
sys.exit(0 if tied > expected + 0.1 and abs(noisy - expected) < 0.02 else "This is no longer so.")
EOF
