#!/usr/bin/env bash
# safetensors.numpy stores a NumPy view of every second row, of some columns or of a transpose as other values, without
# an error. It writes the memory from the view's first element on, not the view. Pass np.ascontiguousarray(view):
# a program that saves one lane or a slice of a ring otherwise loads rows that were never in it. (JAX arrays and
# safetensors.flax are not affected.)
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load, save

rows = np.arange(12, dtype=np.float32).reshape(4, 3)
views = {"rows[::2]": rows[::2], "rows[:, 1:]": rows[:, 1:], "rows.T": rows.T}
print(f"safetensors {safetensors.__version__}, numpy {np.__version__}")

wrong = 0
for name, view in views.items():
    loaded = load(save({"rows": view}))["rows"]
    wrong += not np.array_equal(loaded, view)
    print(f"{name:<12} expected {view.tolist()}")
    print(f"{'':<12} happened {loaded.tolist()}")

contiguous = all(np.array_equal(load(save({"rows": np.ascontiguousarray(v)}))["rows"], v) for v in views.values())
print(f"made contiguous first: all right: {contiguous}")
sys.exit(0 if wrong == len(views) and contiguous else "This is no longer so.")
EOF
