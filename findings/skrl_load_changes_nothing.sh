#!/usr/bin/env bash
# skrl's Memory.load sets attributes that nothing reads: sampling and get_tensor_by_name use the tensors that create_tensor made,
# and the number of rows stays what it was. A run that continues from a loaded memory draws the rows that it adds, no others; a
# memory in use keeps its rows. There is no error. Copy each tensor with set_tensor_by_name and set `filled`, as below.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 gymnasium==1.4.0 tqdm==4.70.1 packaging==26.4 tensorboard==2.21.0
"$work/venv/bin/pip" install --quiet --no-deps skrl==2.1.1
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import logging
import sys
from pathlib import Path

import skrl
import torch
from skrl.memories.torch import RandomMemory

SIZE, ENVS, DRAWS = 100, 2, 10_000
skrl.logger.setLevel(logging.ERROR)

def made():
    memory = RandomMemory(memory_size=SIZE, num_envs=ENVS, device="cpu")
    memory.create_tensor("observations", size=1, dtype=torch.float32)
    return memory

def add(memory, first, steps):
    """Add steps whose observations are numbers from `first` on."""
    for step in range(steps):
        memory.add_samples(observations=torch.tensor([[float(first + ENVS * step + env)] for env in range(ENVS)]))

def drawn(memory):
    """Return the different observations among many draws."""
    return set(memory.sample(["observations"], batch_size=DRAWS)[0][0].flatten().tolist())

print(f"skrl {skrl.__version__}, torch {torch.__version__}")
saved, rows = made(), set(range(SIZE * ENVS))
add(saved, 0, SIZE)
happened = {}
for form in "pt", "npz":
    saved.save(form, format=form)
    path = str(next(Path(form, "memories").iterdir()))
    fresh, used = made(), made()
    add(used, 1000, SIZE)
    for memory in fresh, used:
        memory.load(path)
    loaded = len(fresh)
    add(fresh, 2000, 1)
    happened[form] = loaded, len(drawn(fresh) & rows), len(drawn(used) & rows)
    print(f"{len(saved)} rows saved as {form} and loaded into a new memory; into one that is full of other rows")
    print(f"expected: {len(saved)} rows; in the draws after one more step, {len(rows) - ENVS} of them; {len(rows)}")
    print("happened: {} rows; in the draws after one more step, {} of them; {}".format(*happened[form]))

copied = made()
for name, tensor in torch.load(next(Path("pt", "memories").iterdir())).items():
    copied.set_tensor_by_name(name, tensor)
copied.filled = True
print(f"with set_tensor_by_name and `filled`: {len(copied)} rows, {len(drawn(copied) & rows)} in the draws")
right = drawn(saved) == rows == drawn(copied)
sys.exit(0 if right and set(happened.values()) == {(0, 0, 0)} else "This is no longer so.")
EOF
