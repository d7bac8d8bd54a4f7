#!/usr/bin/env bash
# torchrl's SliceSampler draws trajectories uniformly, not rows, and without replacement an epoch ends after one slice
# of each trajectory. Ten episodes of 100 rows, slices of 10: an "epoch" has seen 100 of 1,000 rows. If half of the rows
# are in five long episodes and half in fifty short ones, a batch holds about a tenth from the long ones. Cut data into
# segments of equal length, or count rows, not epochs.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchrl==0.14.1 tensordict==0.14.3 torch==2.13.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import logging
import sys
import warnings

import torch
import torchrl
from tensordict import TensorDict

warnings.simplefilter("ignore")
logging.disable(logging.INFO)
from torchrl.data import LazyTensorStorage, SliceSampler, SliceSamplerWithoutReplacement, TensorDictReplayBuffer

def buffer(lengths, sampler):
    rows = sum(lengths)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[torch.tensor(lengths).cumsum(0) - 1] = True
    data = {"row": torch.arange(rows), "next": TensorDict({"done": done}, [rows])}
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=50)
    replay.extend(TensorDict(data, [rows]))
    return replay

torch.manual_seed(0)
print(f"torchrl {torchrl.__version__}, torch {torch.__version__}")
epoch = [batch["row"] for batch in buffer([100] * 10, SliceSamplerWithoutReplacement(slice_len=10))]
seen = len(torch.cat(epoch).unique())
print("an epoch without replacement over 1,000 rows: expected: nearly all rows once")
print(f"happened: {seen} rows in {len(epoch)} batches")

mixed = buffer([100] * 5 + [10] * 50, SliceSampler(slice_len=10))
share = (torch.cat([mixed.sample()["row"] for _ in range(400)]) < 500).float().mean().item()
print("half of the rows in five long episodes: expected: about half of each batch from them")
print(f"happened: {share:.0%}")
sys.exit(0 if seen == 100 and share < 0.15 else "This is no longer so.")
EOF
