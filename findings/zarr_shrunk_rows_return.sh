#!/usr/bin/env bash
# Rows that were cut off a Zarr array by resize return when it grows again: Zarr deletes whole chunks, and leaves
# what is behind the new end in the last one. zarr-python and TensorStore agree on this, HDF5 returns zeros. A program
# that cuts a damaged tail off a log of steps and appends with a gap reads the removed steps as data; overwrite the tail with
# the fill value before the resize.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet zarr==3.1.6 tensorstore==0.1.86 h5py==3.16.0 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import importlib.metadata
import sys

import h5py
import numpy as np
import tensorstore as ts
import zarr

print(*(f"{name} {importlib.metadata.version(name)}" for name in ("zarr", "tensorstore", "h5py")), sep=", ")
steps, happened = np.arange(1, 11), {}

array = zarr.create_array("zarr", shape=(10,), chunks=(4,), dtype="int64")
array[:] = steps
array.resize((5,))
array.resize((10,))
happened["zarr"] = array[:].tolist()

chunks = {"name": "regular", "configuration": {"chunk_shape": [4]}}
metadata = {"shape": [10], "data_type": "int64", "chunk_grid": chunks}
store = ts.open({"driver": "zarr3", "kvstore": "memory://", "metadata": metadata}, create=True).result()
store.write(steps).result()
for size in (5, 10):
    store = store.resize(exclusive_max=[size]).result()
happened["tensorstore"] = store.read().result().tolist()

with h5py.File("h5", "w") as file:
    data = file.create_dataset("steps", data=steps, maxshape=(None,), chunks=(4,))
    data.resize((5,))
    data.resize((10,))
    happened["h5py"] = data[:].tolist()

zeros = [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
print("steps 1 to 10 in chunks of 4, cut to 5 rows, grown to 10 again")
print(f"expected: {zeros}")
for name, rows in happened.items():
    print(f"happened: {rows} ({name})")
returned = [1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
sys.exit(0 if happened == {"zarr": returned, "tensorstore": returned, "h5py": zeros} else "This is no longer so.")
EOF
