#!/usr/bin/env bash
# A lazy stack of tensordicts, which keeps trajectories of different lengths, is saved as one folder for each, and loaded from as
# many folders as there are: their number is not stored. If a longer stack was saved at the path before, its last trajectories
# are loaded behind the new ones, without an error. Other tensordicts are right: keys that were not saved do not return. Save
# to a new folder each time, or remove the old one first.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 tensordict==0.15.3
cd "$work"
"$work/venv/bin/python" -W ignore - << 'EOF'
import importlib.metadata
import sys

import torch
from tensordict import TensorDict, lazy_stack

def trajectories(epoch, lengths):
    """Return a stack of trajectories, each step of which says in which epoch it was collected."""
    return lazy_stack([TensorDict({"epoch": torch.full((length,), epoch)}, [length]) for length in lengths])

def loaded(path):
    return [one["epoch"].tolist() for one in TensorDict.load(path).unbind(0)]

print(f"tensordict {importlib.metadata.version('tensordict')}, torch {torch.__version__}")
print("5 trajectories of epoch 1 are saved, then 3 of epoch 2 at the same path, which is loaded")
trajectories(1, (3, 4, 2, 5, 6)).save("latest")
trajectories(2, (2, 3, 2)).save("latest")
trajectories(2, (2, 3, 2)).save("new")
again, fresh = loaded("latest"), loaded("new")
print(f"expected: {fresh}")
print(f"happened: {again}")

TensorDict({"a": torch.ones(2), "b": torch.ones(2)}, [2]).save("keys")
TensorDict({"a": torch.zeros(2)}, [2]).save("keys")
keys = sorted(TensorDict.load("keys").keys())
print(f"a tensordict with the keys a and b, then one with a; expected and happened: {keys}")
as_found = len(fresh) == 3 and again == [*fresh, [1] * 5, [1] * 6] and keys == ["a"]
sys.exit(0 if as_found else "This is no longer so.")
EOF
