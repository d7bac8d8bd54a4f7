#!/usr/bin/env bash
# The sub-buffers of tianshou's VectorReplayBuffer are views of one memory; saved, by pickle or save_hdf5, each is written once
# more. The file is twice as large, the loaded buffer takes twice the memory, and its sub-buffers keep the rows of the time
# of saving. They say which episodes are unfinished: after further steps, the newest row of a lane counts its reward n times
# in n-step returns wherever an episode ended at that place before. After loading, call buffer.set_batch(buffer._meta).
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 gymnasium==1.2.3 h5py==3.16.0 numba==0.68.1 pandas==2.3.3 tqdm==4.70.1 \
  pettingzoo==1.27.0 sensai-utils==1.6.0 deepdiff==8.6.1 matplotlib==3.11.2 tensorboard==2.21.0 overrides==7.7.0 packaging==26.4
"$work/venv/bin/pip" install --quiet --no-deps tianshou==2.0.1
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import os
import sys

import numpy as np
import tianshou
import torch
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch, VectorReplayBuffer

LANES, CAPACITY, N = 4, 400, 3
rng = np.random.default_rng(0)

def rows():
    """Rows of an episode of about ten steps in each lane, with rewards of 1."""
    ends, never, observation = rng.random(LANES) < 0.1, np.zeros(LANES, bool), rng.random((LANES, 256))
    leaves = dict(obs=observation, obs_next=observation, act=np.zeros(LANES), rew=np.ones(LANES), info=Batch())
    return Batch(**leaves, terminated=ends, truncated=never)

def returns(buffer):
    """Three-step returns of all rows, with values of 0."""
    index = buffer.sample_indices(0)
    zeros = lambda buffer, index: torch.zeros(len(index), 1)
    batch = Algorithm.compute_nstep_return(buffer[index], buffer, index, zeros, gamma=1.0, n_step=N)
    return batch.returns.flatten().numpy()

buffer = VectorReplayBuffer(CAPACITY, LANES)
for _ in range(CAPACITY // LANES):
    buffer.add(rows())
buffer.save_hdf5("buffer.h5")
loaded, mended = (VectorReplayBuffer.load_hdf5("buffer.h5") for _ in range(2))
mended.set_batch(mended._meta)
megabytes, size = buffer.obs.nbytes * 2 / 1e6, os.path.getsize("buffer.h5") / 1e6
shared = all(np.shares_memory(part.obs, loaded.obs) for part in loaded.buffers)
print(f"tianshou {tianshou.__version__}, numpy {np.__version__}, {megabytes:.1f} MB of observations")
print(f"file: expected: about {megabytes:.1f} MB; happened: {size:.1f} MB; the loaded lanes are views, as before saving: {shared}")

wrong, right, most = 0, 0, 0.0
for _ in range(CAPACITY // LANES):
    row = rows()
    for each in (buffer, loaded, mended):
        each.add(row)
    wanted, got = returns(buffer), returns(loaded)
    wrong += int((wanted != got).sum())
    right += int((wanted == returns(mended)).all())
    most = max(most, float((got / wanted).max()))
print(f"three-step returns in {CAPACITY // LANES} steps of {LANES} lanes after loading: expected: those of the buffer that was saved")
print(f"happened: {wrong} newest rows differ, by up to {most:.0f} times; after set_batch: all equal in {right} steps")
sys.exit(0 if size > 1.9 * megabytes and not shared and wrong > 10 and right == CAPACITY // LANES else "This is no longer so.")
EOF
