"""Small data sets for tests, and the same rows as numpy arrays."""

import functools

import numpy as np

import fbuf
from fbuf._formats import dataset as _dataset
from tests.support import combinations
from tests.support.trees import same

CHUNK = 4
SCHEMA = _dataset.Schema(
    {
        "obs": ((6, 6), "uint8"),
        "action": ((), "int32"),
        "goal": ((), "int32"),
        "reached": ((), "int32"),
        "reward": ((), "float32"),
        "terminated": ((), "bool"),
        "truncated": ((), "bool"),
    },
    codec={"obs": fbuf.storages.Zstd(chunk=CHUNK)},
)
USED = (
    _dataset.SegmentRows(3, begin=2, stop=13, cut=True),  # neither end at a chunk's
    _dataset.SegmentRows(0),  # shorter than a chunk
    _dataset.SegmentRows(1, begin=5),
    _dataset.SegmentRows(2, stop=8, cut=True),  # whole chunks
)
SIZES = {0: 3, 1: 17, 2: 8, 3: 14}


rows_of = functools.partial(combinations.rows_of, lanes=(), shades=254, size=6)


def write(path, number, schema, rows, step=5, meta=None):
    with _dataset.SegmentWriter(path, number, schema, sync=False) as segment:
        for start in range(0, len(next(iter(rows.values()))), step):
            segment.append({name: array[start : start + step] for name, array in rows.items()})
        segment.commit(meta)


def used_of(segments, used):
    parts = []
    for part in used:
        mine = {name: array[part.begin : part.stop].copy() for name, array in segments[part.number].items()}
        if part.cut:
            mine["truncated"][-1] = True
        parts.append(mine)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def make(path, *, seed=0, schema=SCHEMA):
    rng = np.random.default_rng(seed)
    segments = {number: rows_of(rng, size) for number, size in SIZES.items()}
    for number, rows in segments.items():
        write(path, number, schema, rows)
    _dataset.finish(path, USED, {"name": "made"}, sync=False)
    return used_of(segments, USED)


def check(path, want, **settings):
    with _dataset.DataSet.open(path, **settings) as dataset:
        number = len(next(iter(want.values())))
        assert dataset.rows == number
        same(dataset.read_rows(0, number), want)
        at = np.random.default_rng(0).integers(0, number, (5, 3))
        same(dataset.read(dict.fromkeys(want, at)), {name: array[at] for name, array in want.items()})
