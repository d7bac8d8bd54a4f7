"""Test what the host store compresses, its memory, and readers beside a writer."""

import gc
import threading
import weakref

import numpy as np
import pytest
import zstandard

from fbuf._host import codecs as zstd
from fbuf._host.codecs import Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.raw import RawColumn
from fbuf._host.store.store import Store
from tests.support import disk
from tests.support.store import Plain, check_readers, check_rows, columns_of, compressible, fetch, frames, make, same
from tests.support.tables import by_tier
from tests.support.threads import PATIENCE, Thread


def test_dictionaries_shrink_repetitive_frames():
    rows = frames(6000)[:, None]
    sizes = {}
    for dictionary in (0, 16):
        store = make(Zstd(dictionary=dictionary), shape=(24, 24), length=6000)
        tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 6000, 100)])
        check_rows(store, tickets, rows)
        sizes[dictionary] = store.stats()["payload_bytes"]
    assert store.stats()["dictionaries"] >= 1
    assert sizes[16] * 1.5 < sizes[0] < rows.nbytes / 4


def test_a_dictionary_is_freed_with_its_last_chunk_and_renewed_on_drift():
    store = make(Zstd(), shape=(24, 24), length=2000, slack=0)
    seen = []
    for seed in range(4):  # four games
        rows = frames(7000, seed=seed)[:, None]
        for i in range(0, 7000, 70):
            tickets = store.write([rows[i : i + 70]], None)
        check_rows(store, tickets, rows[i : i + 70])
        seen.append(store._parts[0].coder.current)
        assert store.stats()["dictionaries"] <= 2
    assert len(set(map(id, seen))) == 4
    held = store._parts[0].table.values()
    assert all(d.count == 0 and d.digest == 0 and d not in held for d in seen[:-1])


def test_noise_becomes_a_raw_column():
    store = make(Zstd(), None, shape=(50, 50), lanes=2, length=60, slack=0)
    rows = np.random.default_rng(0).integers(0, 256, (90, 2, 50, 50)).astype(np.uint8)
    tickets = np.concatenate([store.write([rows[i : i + 9]] * 2, None) for i in range(0, 90, 9)])
    assert isinstance(store._parts[0], RawColumn) and store.stats()["chunks"] == 0
    got, ok = fetch(store, tickets)
    assert ok.sum() == 120 and same(got[30:], rows[30:])
    assert store.nbytes < 2.01 * 120 * 2500 + 1000


def test_a_codec_of_ones_own_is_never_dropped():
    store, rng = make(Plain(), shape=(64,), length=4096), np.random.default_rng(0)
    for _ in range(2):
        store.write([rng.integers(0, 256, (2048, 1, 64)).astype(np.uint8)], None)
    assert isinstance(store._parts[0], ChunkedColumn)


def test_nbytes_counts_what_is_held():
    rows = frames(4000, 40)[:, None]
    store = make(Zstd(), None, shape=(40, 40), length=4000, slack=0)
    store.write([rows[:0]] * 2, None)
    empty = store.nbytes
    for i in range(0, 4000, 50):
        store.write([rows[i : i + 50]] * 2, None)
    stats, (chunks, ring) = store.stats(), store._parts
    contexts = sum(d.nbytes for d in chunks.table.values())
    known = stats["payload_bytes"] + rows.nbytes + 18 * stats["chunks"] + chunks.open.nbytes + contexts
    assert stats["nbytes"] == store.nbytes and ring.size(np.zeros(1)) == rows.nbytes and chunks.coder.nbytes == 0
    assert known <= store.nbytes <= known + max(0.05 * stats["payload_bytes"], 40_000)
    assert empty < 20_000 and stats["raw_bytes"] == 2 * rows.nbytes and stats["rows_live"] == 4000


def test_a_slow_lane_does_not_keep_segments_alive():
    store = make(Zstd(chunk=1), shape=(40, 40), lanes=2, length=300, slack=0)
    rng, keep = np.random.default_rng(0), np.ones((60, 2), bool)
    tickets, slow, first = [], [], None
    keep[1:, 1] = False
    for _ in range(200):  # of 12,000 rows of lane 0, 300 are live, and all 200 of lane 1
        rows = rng.integers(0, 4, (60, 2, 40, 40), np.uint8)
        tickets.append(store.write([rows], keep)[0, 1])
        slow.append(rows[0, 1])
        arena = store._parts[0].arena
        first = first or weakref.ref(arena.segments[0].array)
    gc.collect()
    assert first() is None and arena.capacity < 1.5 * arena.live + 5 * 32 * 1024
    check_rows(store, tickets, np.stack(slow))


@pytest.mark.parametrize("files", by_tier(True, more=[False]))
@pytest.mark.parametrize("codec", by_tier(Zstd(), more=[None]))
def test_two_threads_read_while_one_writes(codec, files, tmp_path):
    columns, sizes = columns_of(codec, shape=(600,), dtype="uint64"), {"lanes": 2, "length": 300, "slack": 0}
    store = disk.make(tmp_path, columns, **sizes) if files else Store(columns, **sizes)
    check_readers(store, lambda tickets: np.repeat(tickets[..., None], 600, -1), 250)
    assert files or isinstance(store._parts[0], ChunkedColumn if codec else RawColumn)


class Watched:
    """A decompressor that two threads are never in at once: both wait for each other there."""

    barrier, real = threading.Barrier(2), zstandard.ZstdDecompressor

    def __init__(self, **options):
        self.own, self.lock = Watched.real(**options), threading.Lock()

    def decompress(self, data):
        with self.lock:
            Watched.barrier.wait(PATIENCE)
        return self.own.decompress(data)


def test_threads_share_no_decompressor(monkeypatch):
    store, _, tickets = compressible()
    monkeypatch.setattr(zstd.zstandard, "ZstdDecompressor", Watched)
    for thread in [Thread(fetch, store, tickets[:8]) for _ in range(2)]:
        thread.ends()
