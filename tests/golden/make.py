"""Golden files: checkpoints as each version of the format wrote them, which every later release must load.

    python -m tests.golden.make v1/plain      # writes tests/golden/v1/plain anew; never for a version that was released

A case is a function that saves into a folder, and one that checks what is loaded from it. What it holds is computed, not drawn,
so that it is the same with any release of NumPy.
"""

import shutil
import sys
from pathlib import Path

import numpy as np

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.dtypes import NAMES, dtype_named
from tests.support.memory_disk import Blocks, Keyed, same

DTYPES = [name for name in NAMES if name not in ("complex32", "bcomplex32", "int1", "uint1")]  # of ml_dtypes 0.5
FOLDER = Path(__file__).resolve().parent


def plain_arrays(k):
    """Save `k` of three: every dtype, every form of shape, rows that change."""
    arrays = {}
    for name in DTYPES:
        bits = (np.arange(6 * 16) * 37 + 11 * len(name)) % 251
        kind = dtype_named(name)
        if name == "bool" or name.startswith(("int", "uint")) and kind.itemsize == 1 and name[-1] in "124":
            arrays[name] = (bits[:6] % 2).astype(kind).reshape(2, 3)
        else:
            arrays[name] = bits.astype(np.uint8)[: 6 * kind.itemsize].view(kind).reshape(2, 3)
    rows = (np.arange(60, dtype=np.int32).reshape(20, 3) * 7) % 101
    rows[: 2 * k] += 1000 * k
    arrays["rows"] = rows
    arrays["scalar"] = np.array(k, np.int64)
    arrays["none"] = np.zeros((0, 3), np.float32)
    arrays["flat"] = np.zeros((4, 0), np.uint8)
    arrays["log"] = np.concatenate([np.full(5 + i, i, np.uint8) for i in range(k, k + 6)])
    return arrays


def plain_meta(k):
    return {"k": k, "text": 'ä " \n', "numbers": [1, -(2**70), 0.1, None, True], "deep": {"a": [{"b": {}}]}}


def make_plain(path):
    for k in range(3):
        arrays = plain_arrays(k)
        arrays["rows"] = Blocks(arrays["rows"], 4, [f"{k if b <= k // 2 else 0}" for b in range(5)] if k else None)
        arrays["log"] = Keyed({f"piece-{i}": np.full(5 + i, i, np.uint8) for i in range(k, k + 6)})
        checkpoint.write(path, arrays, plain_meta(k), keep=2)


def check_plain(path):
    with checkpoint.read(path) as saved:
        assert saved.meta == plain_meta(2) and saved.generation == 3
        same(saved, plain_arrays(2))


CASES = {"v1/plain": (make_plain, check_plain)}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        shutil.rmtree(FOLDER / case, ignore_errors=True)
        make, check = CASES[case]
        make(str(FOLDER / case))
        (FOLDER / case / "lock").unlink()
        check(str(FOLDER / case))
        print(case, sum(file.stat().st_size for file in (FOLDER / case).iterdir()), "bytes")
