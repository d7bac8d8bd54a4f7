#!/usr/bin/env bash
# A run of elegantrl that continues from a saved buffer trains on the rows of its first write alone. `save_or_load_history`
# sets the number of rows, but neither the position nor that the ring may be full; the next `update` takes the number of rows
# from the position, which is 0 in a new buffer. The loaded rows are overwritten one by one before any is drawn again. Set
# `buffer.p` after loading, and `buffer.if_full` if `buffer.cur_size == buffer.max_size` (then `p` is 0).
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$work/venv/bin/pip" install --quiet --no-deps elegantrl==0.3.6
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import torch
from elegantrl.train.replay_buffer import ReplayBuffer

SIZE, STEPS, MORE = 20_000, 10_000, 64  # as many rows as a call of `explore_env` may return
print(f"elegantrl {importlib.metadata.version('elegantrl')}, torch {torch.__version__}, {STEPS:,} rows saved, then loaded")

def rows(first, count):  # the number of a row is its state
    state = torch.arange(first, first + count, dtype=torch.float32)[:, None, None]
    return state, torch.zeros(count, 1, 1), torch.zeros(count, 1), torch.ones(count, 1)

def made():
    return ReplayBuffer(SIZE, state_dim=1, action_dim=1, gpu_id=-1)

def drawn(buffer):
    state, *_ = buffer.sample(4096)
    return len(state.unique()), int((state < STEPS).sum())

without = made()
without.update(rows(0, STEPS))
without.save_or_load_history(".", if_save=True)
loaded = made()
loaded.save_or_load_history(".", if_save=False)
print(f"loaded: {loaded.cur_size:,} rows")
for buffer in (without, loaded):
    buffer.update(rows(STEPS, MORE))
(expected, _), (happened, old) = drawn(without), drawn(loaded)
print(f"after {MORE} more rows: expected: {without.cur_size:,} rows, of which 4,096 draws show {expected:,}, as without loading")
print(f"happened: {loaded.cur_size:,} rows, of which they show {happened}; {old} draws of a row that was loaded")
sys.exit(0 if expected > 3000 and loaded.cur_size == MORE and old == 0 else "This is no longer so.")
EOF
