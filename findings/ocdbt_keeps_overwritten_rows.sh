#!/usr/bin/env bash
# A ring of rows in a TensorStore OCDBT database grows for ever: each write of a row stores its whole chunk again, and
# the old chunk stays in the files, also after the row is overwritten, deleted and the store closed. A ring of 1 MB
# takes 200 MB after 200 rows of 1 kB. Nothing in the library compacts it: keep rings in plain files, or copy the
# database to a new one and delete the old.
#
# Needs Python 3.11 or newer.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet tensorstore==0.1.86 numpy==2.4.6
cd "$work"
"$work/venv/bin/python" - << 'EOF'
import importlib.metadata
import os
import sys

import numpy as np
import tensorstore as ts

ROWS, WIDTH, WRITES = 1000, 1000, 200  # 1 MB, one chunk

def ring(name, **kvstore):
    chunks = {"name": "regular", "configuration": {"chunk_shape": [ROWS, WIDTH]}}
    metadata = {"shape": [ROWS, WIDTH], "data_type": "uint8", "chunk_grid": chunks}
    spec = {"driver": "zarr3", "kvstore": {**kvstore}, "metadata": metadata}
    return ts.open(spec, create=True).result()

def megabytes(folder):
    return sum(os.path.getsize(os.path.join(at, name)) for at, _, names in os.walk(folder) for name in names) / 1e6

def fill(store):
    rows = np.random.default_rng(0).integers(0, 256, (ROWS, WIDTH), np.uint8)
    store.write(rows).result()
    for slot in range(WRITES):
        store[slot].write(rows[-slot]).result()

print(f"tensorstore {importlib.metadata.version('tensorstore')}")
base = f"file://{os.getcwd()}"
fill(ring("ocdbt", driver="ocdbt", base=f"{base}/ocdbt/"))
fill(ring("files", driver="file", path=f"{os.getcwd()}/files/"))
ocdbt, files = megabytes("ocdbt"), megabytes("files")
ts.KvStore.open({"driver": "ocdbt", "base": f"{base}/ocdbt/"}).result().delete_range(ts.KvStore.KeyRange()).result()
empty = megabytes("ocdbt")

print(f"a ring of 1 MB, {WRITES} rows of 1 kB overwritten")
print("expected: about 1 MB on disk with both, and nothing after deleting everything")
print(f"happened: OCDBT {ocdbt:.0f} MB, plain files {files:.0f} MB; OCDBT after deleting everything {empty:.0f} MB")
sys.exit(0 if ocdbt > 190 and files < 2 and empty > 190 else "This is no longer so.")
EOF
