#!/usr/bin/env bash
# A jitted function of JAX 0.12.0.1 refuses NumPy arrays in another byte order than the machine's (TypeError), but only until
# it was called with a native array of that dtype: from then on it takes the bytes as native, without an error. Such arrays
# come from HDF5, FITS and IDX files and from np.frombuffer(data, ">f4"). Convert them first:
# x.astype(x.dtype.newbyteorder("=")).
#
# Needs Python 3.12 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet jax==0.12.0.1 numpy==2.5.5
cd "$work"
JAX_PLATFORMS=cpu "$work/venv/bin/python" - << 'EOF'
import sys

import jax
import numpy as np

print(f"jax {jax.__version__}, numpy {np.__version__}")
wrong = 0
for dtype in ("i4", "f4"):
    native = np.arange(1, 4).astype(dtype)
    foreign = native.astype(">" + dtype)
    for before in (False, True):
        twice = jax.jit(lambda x: x + x)
        if before:
            twice(native)
        try:
            made = np.asarray(twice(foreign)).tolist()
        except TypeError:
            made = "TypeError"
        print(f"expected: {(native + native).tolist()} or an error ({foreign.dtype.str}, a native call before: {before})")
        print(f"happened: {made}")
        wrong += made not in ("TypeError", (native + native).tolist())
sys.exit(0 if wrong == 2 else "This is no longer so.")
EOF
