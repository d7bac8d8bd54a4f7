#!/usr/bin/env bash
# The importance weights of xuance's PerOffPolicyBuffer are the ratio of a row's probability to the smallest one: the rows
# drawn most often get the largest weights, not the smallest, and beta changes nothing. Used in a loss they add to the bias
# that they should remove; its own PerDQN_Learner ignores them, so PER_beta0 has no effect at all. And the last slot, until
# the buffer is full the newest row, is never drawn. Compute (N P) ** -beta from the priorities yourself.
#
# Needs Python 3.11.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==1.26.4 gymnasium==1.2.3 scipy==1.15.3 pyyaml==6.0.4 tqdm==4.70.1 \
  opencv-python-headless==4.10.0.84
"$work/venv/bin/pip" install --quiet --no-deps xuance==1.4.4
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import random
import sys

import numpy as np
from gymnasium.spaces import Box, Discrete
from xuance.common import PerOffPolicyBuffer

ROWS = 64
random.seed(0)
replay = PerOffPolicyBuffer(Box(-1, 1, (1,)), Discrete(2), None, 1, ROWS, ROWS, alpha=1.0)
for row in range(ROWS):
    replay.store(*[np.full(shape, row / ROWS) for shape in ((1, 1), 1, 1, 1, (1, 1))])
priorities = np.where(np.arange(ROWS) % 8 == 4, 10.0, 1.0)
replay.update_priorities(np.arange(ROWS)[None], priorities)
print(f"xuance {importlib.metadata.version('xuance')}, numpy {np.__version__}")

print("priorities 1 and 10, alpha 1, weights of the rows of 1 and of 10: expected: (N P) ** -beta over the largest")
wrong = True
for beta in (0.4, 1.0):
    batches = [replay.sample(beta) for _ in range(100)]
    index = np.concatenate([batch["step_choices"][0] for batch in batches])
    weights = np.concatenate([batch["weights"][0] for batch in batches])
    low, high = (np.unique(weights[priorities[index] == priority].round(6)).tolist() for priority in (1, 10))
    print(f"beta {beta}: expected 1 and {10**-beta:.2f}; happened: {low} and {high}")
    wrong = wrong and low == [1.0] and high == [10.0]

index = np.concatenate([replay.sample(1.0)["step_choices"][0] for _ in range(2000)])
counts = np.bincount(index, minlength=ROWS)
print(f"draws of rows of priority 1: expected: about {len(index) / priorities.sum():.0f} of {len(index):,} each")
print(f"happened: {counts[priorities == 1][:-1].min()} or more, and {counts[-1]} of the last slot")
sys.exit(0 if wrong and counts[-1] == 0 and counts[:-1].min() > 500 else "This is no longer so.")
EOF
