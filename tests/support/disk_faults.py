"""Stores in files whose calls of the file system fail, and what is left for the next process."""

import errno
import itertools
import os

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.columns.chunked_file import ChunkedFileColumn
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.memory import file_arena
from tests.support.disk import make
from tests.support.store import columns_of
from tests.support.store_model import Model


def resumed(model, path):
    """Resume the store that a model describes; of the tickets of changed rows only the last are left."""
    old = model.store
    settings = {"lanes": old.lanes, "length": old.length, "slack": old.slack}
    columns = old.columns
    old.close()
    store = make(path, columns, **settings, resume=True)
    alive = model.live()
    last = {}
    for ticket, origin in model.origin.items():
        last[origin] = max(ticket, last.get(origin, 0))
    for ticket in [t for t in model.origin if t not in last.values() or t not in alive]:
        del model.origin[ticket], model.rows[ticket]
    model.store = store
    count, newest, _ = store.newest()
    assert count.tolist() == [len(lane) for lane in model.lanes]
    for e, lane in enumerate(model.lanes):
        expected = [last.get(t, t) for t in lane][-store.length :]
        first = len(lane) - len(expected)
        got = {(first + i) % store.length: t for i, t in enumerate(expected)}
        assert [got.get(i, 0) for i in range(store.length)] == newest[:, e].tolist()
    return store


class Faults:
    """Make the n-th call of the file system fail; a write does half of its work first."""

    def __init__(self, monkeypatch):
        self.left = -1
        for name in ("pwrite", "open", "ftruncate", "replace"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name, real):
        def call(*args, **kwargs):
            if self.left == 0:
                self.left = -1
                if name == "pwrite" and len(args[1]) > 1:
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                raise OSError(errno.ENOSPC, "injected")
            self.left -= self.left > 0
            return real(*args, **kwargs)

        return call


NOISE = np.random.default_rng(0).integers(0, 256, (400, 2, 400), np.uint8)

STILL = np.repeat(np.arange(400, dtype=np.uint8)[:, None, None], 2, 1) * np.ones(400, np.uint8)


def segments(store):
    part = store._parts[1]
    return set(part.arena.segments) if isinstance(part, ChunkedFileColumn) else set()


def check_failing_writes(kind, seed, steps, tmp_path, monkeypatch):
    """Each write fails at each of its calls: every row that was there is, and no other, here and for the next process.

    Noise does not compress, so a column with a codec becomes a ring, in the very write that may fail.
    """
    monkeypatch.setattr(file_arena.FileArena, "small", 8192)  # several segments
    faults = Faults(monkeypatch)
    source = {"noise": NOISE, "still": STILL}[kind]
    columns = columns_of(None, Zstd(chunk=4), shape=(400,))
    rng = np.random.default_rng(seed)
    model = Model(make(tmp_path, columns, lanes=2, length=30, slack=3))
    failed = 0
    for step in range(steps):
        n = int(rng.integers(1, 17))
        batch = [source[rng.integers(0, 400, n)] for _ in columns]
        keep = None if rng.random() < 0.5 else rng.random((n, 2)) < 0.7
        for number in itertools.count(int(rng.integers(0, 2))):
            faults.left, before = number, segments(model.store)
            try:
                model.write(batch, keep)
            except OSError as error:
                failed += 1
                assert segments(model.store) <= before
                assert "bytes are free there. Make room in" in str(error) and str(tmp_path) in str(error)
                faults.left = -1
                model.check(rng)  # every row that was there, and no other
                if rng.random() < 0.2:
                    resumed(model, tmp_path)  # and for the next process
                    model.check(rng)
            else:
                faults.left = -1
                break
        model.check(rng)
        if step % 7 == 0:
            resumed(model, tmp_path)
            model.check(rng)
    assert failed > steps
    assert isinstance(model.store._parts[1], RawFileColumn if kind == "noise" else ChunkedFileColumn)
