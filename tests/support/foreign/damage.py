"""Files of other libraries with bytes changed or cut off: each is refused by its path, or read as its arrays say.

What a damaged file still shows is what h5py, NumPy and pyarrow themselves read in it, array by array. Arrays that they read as
before must come out as before, in the same rows of the same lanes; whatever else changed, the number of rows is the same.
"""

import contextlib
import random
import re
import resource
import shutil
import time
import tracemalloc
import warnings
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet

from fbuf import StoreCorrupted, interop
from tests.support.foreign import FILES

CASES = {
    "tianshou_part.hdf5": interop.from_file,
    "tianshou_wrapped.hdf5": interop.from_file,
    "tianshou_prioritized.hdf5": interop.from_file,
    "tianshou_vector.hdf5": interop.from_file,
    "d3rlpy_continuous.h5": interop.from_file,
    "d3rlpy_tuple.h5": interop.from_file,
    "robomimic_1.hdf5": lambda path: interop.from_file(path, ends="trajectory"),
    "ogbench.npz": interop.from_ogbench,
    "ogbench_regular.npz": interop.from_ogbench,
    "ogbench_compact.npz": interop.from_ogbench,
    "skrl_part.npz": lambda path: interop.from_skrl(path, position=9, filled=False),
    "skrl_wrapped.npz": lambda path: interop.from_skrl(path, position=13, filled=True),
    "lerobot_rewards/data/chunk-000/file-000.parquet": lambda path: interop.from_file(path, ends="trajectory"),
    "lerobot_rewards/meta/info.json": lambda path: interop.from_file(path, ends="trajectory"),
}
LEAVES = {"obs": "obs|state", "final_obs": "obs|state", "action": "act", "reward": "rew"}
"""Names in a file whose arrays become a leaf here."""
ENDS = "terminal|terminated|truncated|done|mask|valid|episode_index|obs|state"
"""Names of arrays that say where episodes end; a next observation that is not the next row's says it too."""
SECONDS, RATIO, CONSTANT = 10, 20, 8 * 2**20


def rows_of(name, path):
    """Return the rows that a sink would write, and which of them exist: `({leaf: [N, ...]}, mask [N] or [N, E])`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # next observations that a flipped bit changed look like shuffled rows
        source = CASES[name](path)
        _, blocks, steps = source.stored()
        parts = list(blocks(0, steps, max(steps, 1)))
    rows = parts[0] if parts else {}
    lead = (steps,) if source.lanes is None else (steps, source.lanes)
    return rows, np.ones(lead, bool) if source.mask is None else source.mask(0, steps)


def shown(path):
    """Return what other readers find: arrays by name, and the error of those that they cannot read."""
    out = {}
    if path.suffix == ".npz":
        with _into(out, "file"), np.load(path) as file:
            for name in file.files:
                with _into(out, name):
                    out[name] = file[name]
    elif path.suffix == ".parquet":
        with _into(out, "file"):
            out |= pyarrow.parquet.read_table(path, use_threads=False).to_pydict()
    elif path.suffix == ".json":
        out["file"] = path.read_bytes()
    else:
        with _into(out, "file"), h5py.File(path) as file:
            _walk(out, file, "")
    return {name: _bytes(value) for name, value in out.items()}


def _walk(out, group, prefix):
    with _into(out, prefix + "attributes"):
        for name in group.attrs:
            if not group.attrs.get_id(name).dtype.hasobject:
                out[f"{prefix}{name} (attribute)"] = group.attrs[name]
    for key in group:
        with _into(out, prefix + key):
            item = group[key]
            if isinstance(item, h5py.Group):
                _walk(out, item, f"{prefix}{key}/")
            else:
                plain = not item.dtype.hasobject and (item.size is None or item.nbytes < 2**24)
                out[prefix + key] = item[()] if plain else "not read"  # text may never end where it is damaged


@contextlib.contextmanager
def _into(out, name):
    try:
        yield
    except Exception as error:
        out[name] = repr(error)


def _bytes(value):
    array = np.asarray(value)
    return repr(value) if array.dtype.hasobject else f"{array.dtype}{array.shape}".encode() + array.tobytes()


def damaged(data, rng):
    """Return the bytes cut off, or with some bits flipped, or some bytes overwritten."""
    data, kind = bytearray(data), rng.randrange(8)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind < 5:
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        at, number = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
        data[at : at + number] = bytes(rng.choice([0, 127, 255]) for _ in range(number))[: len(data) - at]
    return bytes(data)


def check(seed, number, folder):
    """Check so many damaged files; return how many were refused, and how many read."""
    rng, folder = random.Random(seed), Path(folder)
    names = [list(CASES)[(seed + i) % len(CASES)] for i in range(number)]
    intact = {}
    for name in dict.fromkeys(names):
        root = name.split("/")[0]
        if "/" in name:
            shutil.copytree(FILES / root, folder / root, dirs_exist_ok=True)
        else:
            shutil.copy(FILES / root, folder)
        whole = (folder / name).read_bytes()
        intact[name] = whole, rows_of(name, folder / root), shown(folder / name)
    refused = 0
    tracemalloc.start()
    try:
        for i, name in enumerate(names):
            whole, before, arrays = intact[name]
            (folder / name).write_bytes(damaged(whole, rng))
            refused += not _check(f"{name}, seed {seed}, input {i}", name, folder, before, arrays)
            (folder / name).write_bytes(whole)
    finally:
        tracemalloc.stop()
    return refused, number - refused


def _check(where, name, folder, before, arrays):
    """Check one; return whether it was read."""
    path = folder / name.split("/")[0]
    size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
    tracemalloc.reset_peak()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held, begin = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        rows, exists = rows_of(name, path)
        error = None
    except (ValueError, OSError, StoreCorrupted) as caught:
        error = caught
    except Exception as caught:
        raise AssertionError(f"{where}: {type(caught).__name__}: {caught}") from caught
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) * 1024
    assert grown < 256 * 2**20, f"{where}: memory grew by {grown} bytes, allocations of C libraries included"
    took, peak = time.process_time() - begin, tracemalloc.get_traced_memory()[1] - held
    assert took < SECONDS, f"{where}: took {took} s"
    assert peak < RATIO * size + CONSTANT, f"{where}: allocated {peak} bytes for a file of {size}"
    if error is not None:
        assert str(path) in str(error), f"{where}: does not name {path}: {error}"
        error.__traceback__ = None
        return False
    now = shown(folder / name)
    changed = [leaf for leaf in now.keys() | arrays.keys() if now.get(leaf) != arrays.get(leaf)]
    assert exists.shape == before[1].shape, f"{where}: rows {before[1].shape} became {exists.shape}"
    assert rows.keys() == before[0].keys(), f"{where}: leaves {sorted(before[0])} became {sorted(rows)}"
    known = "|".join([*LEAVES.values(), ENDS])
    if all(re.search(known, leaf) for leaf in changed):  # else the file states other places of rows
        assert (exists == before[1]).all(), f"{where}: other rows exist"
        for leaf in rows:
            says = LEAVES.get(leaf.split("/")[0], "(?!)") if leaf not in ("terminated", "truncated") else ENDS
            if leaf.startswith("final_obs"):
                says = ENDS
            if not any(re.search(says, other) for other in changed):
                assert rows[leaf].tobytes() == before[0][leaf].tobytes(), f"{where}: '{leaf}' changed, not {changed}"
    return True
