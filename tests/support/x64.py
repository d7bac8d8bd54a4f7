"""Rows with 64-bit leaves at the extremes, and buffers that keep them on the host."""

import numpy as np

import fbuf
from fbuf.storages import Compressed, Host, Memmap
from tests.support.trees import same

KEYS = ("id", "u", "x")
EXAMPLE = {"id": np.int64(0), "u": np.uint64(0), "x": np.float64(0), "n": np.float32(0)}
STORAGES = {
    "host": lambda path: Host(keys=KEYS),
    "compressed": lambda path: Compressed(keys=KEYS),
    "memmap": lambda path: Memmap(str(path / "rows"), keys=(*KEYS, "n")),
    "compressed files": lambda path: Compressed(keys=(*KEYS, "n"), path=str(path / "rows")),
}
IDS = np.array([-(2**63), 2**63 - 1, -1, 0, 2**40 + 1, 2**53 + 1, -(2**31) - 1], np.int64)
UNSIGNED = np.array([2**64 - 1, 0, 2**63, 2**32, 2**53 + 1, 1], np.uint64)
_NAN = np.array([0x7FF8DEAD0000BEEF], np.uint64).view(np.float64)  # with a payload
NUMBERS = np.array([5e-324, 1.7976931348623157e308, -0.0, _NAN[0], -np.inf, 1 / 3, 2.0**-1074 * 3, -1e300])


def extremes(count, shape=(), first=0):
    def some(values):
        at = np.add.outer(np.arange(first, first + count), np.arange(int(np.prod(shape))).reshape(shape))
        return values[at % len(values)]

    numbers = np.arange(first, first + count, dtype=np.float32)
    return {"id": some(IDS), "u": some(UNSIGNED), "x": some(NUMBERS), "n": numbers}


def buffer_of(storage, path, capacity=16, **settings):
    return fbuf.Buffer(capacity, storage=STORAGES[storage](path), **settings)


def same_rows(got, wanted):
    same({name: np.asarray(column) for name, column in got.items()}, wanted)
