"""Host stores and rows for them. Nothing here imports pytest or Hypothesis: other processes start with it quickly."""

import dataclasses
import threading
import zlib

import ml_dtypes
import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.store.store import Column, Store
from tests.support.threads import Thread

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
DTYPES += ["uint16", "uint32", "complex128", ml_dtypes.bfloat16]
DTYPES += [getattr(ml_dtypes, n) for n in dir(ml_dtypes) if n.startswith(("float8", "float6", "float4", "int", "uint"))]


@dataclasses.dataclass(frozen=True)
class Deflate:
    chunk: int = 4

    def encode(self, rows):
        return zlib.compress(rows.tobytes())

    def decode(self, data, out):
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


@dataclasses.dataclass(frozen=True)
class Plain:
    chunk: int = 4

    def encode(self, rows):
        return rows.tobytes()

    def decode(self, data, out):
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


class Failing(Plain):
    """A codec that fails once `left` more chunks were encoded or decoded."""

    left = 1 << 30

    def _count(self):
        Failing.left -= 1
        if Failing.left < 0:
            raise OSError("full")

    def encode(self, rows):
        self._count()
        return super().encode(rows)

    def decode(self, data, out):
        self._count()
        super().decode(data, out)


CODECS = [None, Zstd(), Zstd(chunk=1), Zstd(chunk=3, dictionary=0), Deflate()]


def columns_of(*codecs, shape=(5,), dtype="uint8"):
    return tuple(Column(f"c{i}", shape, np.dtype(dtype), c) for i, c in enumerate(codecs))


def make(*codecs, shape=(5,), dtype="uint8", **sizes):
    return Store(columns_of(*codecs, shape=shape, dtype=dtype), **({"lanes": 1, "length": 16, "slack": 4} | sizes))


def load(store, arrays=None, **more):
    if arrays is None:
        arrays = {name: np.array(array) for name, array in store.to_arrays().items()}
        assert all(array.dtype.kind in "iu" for array in arrays.values())
    fixed = {"lanes": store.lanes, "length": store.length, "slack": store.slack}
    return Store.from_arrays(store.columns, arrays, **(fixed | more))


def fetch(store, tickets, column=0):
    """Read into an output full of rubbish, so that what is not written shows."""
    tickets = np.asarray(tickets, np.uint64)
    spec = store.columns[column]
    out = np.full(tickets.size * spec.nbytes, 171, np.uint8).view(spec.dtype).reshape(*tickets.shape, *spec.shape)
    return out, store.read([(column, tickets, out)])


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def check_rows(store, tickets, rows, column=0):
    got, ok = fetch(store, tickets, column)
    assert ok.all() and same(got, rows)


def check_readers(store, rows_of, writes):
    """Read in two threads while one writes: each row is what `rows_of` tickets returns, or zeros where it is missing."""
    top, stop = [0], threading.Event()

    def read(seed):
        rng, seen = np.random.default_rng(seed), 0
        while not (stop.is_set() and seen):
            wanted = rng.integers(max(top[0] - 1500, 1), top[0] + 20, 256).astype(np.uint64)
            got, ok = fetch(store, wanted)
            rows = rows_of(wanted)
            assert (got == np.where(ok.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)).all()
            seen += int(ok.sum())

    readers, rng = [Thread(read, i) for i in range(2)], np.random.default_rng(9)
    try:
        for n in rng.integers(1, 40, writes):
            expected = np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(top[0] + 1)
            assert (store.write([np.ascontiguousarray(rows_of(expected))], None) == expected).all()
            top[0] = int(expected[-1, -1])
    finally:
        stop.set()
    for reader in readers:
        reader.ends()


def frames(count, size=24, seed=0):
    """A fixed background and a few moving squares: as repetitive as a game."""
    rng = np.random.default_rng(seed)
    out = np.repeat(rng.integers(0, 255, (1, size, size), np.uint8), count, 0)
    for _ in range(3):
        y, x = (np.cumsum(rng.integers(-1, 2, count)) % (size - 4) for _ in range(2))
        for t in range(count):
            out[t, y[t] : y[t] + 4, x[t] : x[t] + 4] = rng.integers(200, 202)
    return out


def compressible(codec=None):
    store, rows = make(codec or Zstd(), shape=(24, 24), length=64, slack=0), frames(64)[:, None]
    return store, rows, store.write([rows], None)
