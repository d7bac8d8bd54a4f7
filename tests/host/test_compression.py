"""Test what the host store compresses, its memory, and readers beside a writer."""

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import zstandard

from fbuf._host.codecs import codec as zstd
from fbuf._host.codecs.codec import Dictionary, Zstd, compressor
from fbuf._host.columns import chunked
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.raw import RawColumn
from tests.support.store import check_rows, compressible, fetch, frames, make, same
from tests.support.threads import PATIENCE, Thread


def test_dictionaries_shrink_repetitive_frames() -> None:
    rows = frames(6000)[:, None]
    sizes = {}
    for dictionary in (0, 16):
        store = make(Zstd(dictionary=dictionary), shape=(24, 24), length=6000)
        tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 6000, 100)])
        check_rows(store, tickets, rows)
        sizes[dictionary] = store.stats()["payload_bytes"]
    assert store.stats()["dictionaries"] >= 1
    assert sizes[16] * 1.5 < sizes[0] < rows.nbytes / 4


def test_a_dictionary_is_freed_with_its_last_chunk_and_renewed_on_drift() -> None:
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


def test_dictionaries_that_cannot_pay_are_not_made() -> None:
    store = make(Zstd(), shape=(24, 24), length=100, slack=0)
    rows = frames(6000)[:, None]
    for i in range(0, 6000, 50):
        store.write([rows[i : i + 50]], None)
    assert store.stats()["dictionaries"] == 0


def test_noise_becomes_a_raw_column() -> None:
    store = make(Zstd(), None, shape=(50, 50), lanes=2, length=60, slack=0)
    rows = np.random.default_rng(0).integers(0, 256, (90, 2, 50, 50)).astype(np.uint8)
    tickets = np.concatenate([store.write([rows[i : i + 9]] * 2, None) for i in range(0, 90, 9)])
    assert isinstance(store._parts[0], RawColumn) and store.stats()["chunks"] == 0
    got, ok = fetch(store, tickets)
    assert ok.sum() == 120 and same(got[30:], rows[30:])
    assert store.nbytes < 2.01 * 120 * 2500 + 1000


def test_small_noise_becomes_a_raw_column_early() -> None:
    store = make(Zstd(), shape=(3,), dtype="float32", length=10_000)
    store.write([np.random.default_rng(0).normal(size=(2100, 1, 3)).astype(np.float32)], None)
    assert isinstance(store._parts[0], RawColumn)


def test_repeated_rows_keep_their_codec() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 64)).astype(np.uint8)
    rows = noise[np.random.default_rng(1).integers(0, 12, 3000)][:, None]
    store = make(Zstd(chunk=1), shape=(64, 64), length=3000, slack=0)
    tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 3000, 100)])
    assert isinstance(store._parts[0], ChunkedColumn)
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows) and store.nbytes < rows.nbytes / 3


def test_nbytes_counts_what_is_held() -> None:
    rows = frames(4000, 40)[:, None]
    store = make(Zstd(), None, shape=(40, 40), length=4000, slack=0)
    store.write([rows[:0]] * 2, None)
    empty = store.nbytes
    for i in range(0, 4000, 50):
        store.write([rows[i : i + 50]] * 2, None)
    stats, (chunks, ring) = store.stats(), store._parts
    contexts = sum(d.nbytes for d in chunks.table.values())
    known = stats["payload_bytes"] + rows.nbytes + 18 * stats["chunks"] + chunks.open.nbytes + contexts
    assert stats["nbytes"] == store.nbytes and ring.size(np.zeros(1)) == rows.nbytes
    assert known <= store.nbytes <= known + max(0.05 * stats["payload_bytes"], 40_000)
    assert empty < 20_000 and stats["raw_bytes"] == 2 * rows.nbytes and stats["rows_live"] == 4000


@pytest.mark.parametrize("level", [1, 3, 13])
def test_a_digest_has_the_size_that_nbytes_counts(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = frames(24, 40)
    shared, own = (Dictionary(rows[:16].tobytes()) for _ in range(2))
    packer = compressor(level, rows[16:].nbytes, shared)
    encoded = packer.compress(rows[16:].tobytes())
    monkeypatch.setattr(Dictionary, "digested", lambda dictionary, _: dictionary.data)  # the context digests it
    alone = compressor(level, rows[16:].nbytes, own)
    assert alone.compress(rows[16:].tobytes()) == encoded
    assert alone.memory_size() - packer.memory_size() == shared.digest > 0 == own.digest
    shared.free_digest()
    assert shared.nbytes == own.nbytes and shared.data.as_bytes() == own.data.as_bytes()


def test_a_large_column_keeps_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rows = make(Zstd(), shape=(24, 24), length=400), frames(400)[:, None]
    coder = store._parts[0].coder
    store.write([rows[:200]], None)
    assert coder.nbytes == 0
    monkeypatch.setattr(chunked, "_LARGE", 0)
    before = store.nbytes
    store.write([rows[200:]], None)
    assert coder.nbytes > 0 and store.nbytes >= before + coder.nbytes


def test_a_segment_is_freed_with_its_last_chunk() -> None:
    store = make(Zstd(), shape=(40, 40), length=500, slack=0)
    noise = np.random.default_rng(0).integers(0, 4, (4000, 1, 40, 40), np.uint8)
    store.write([noise[:400]], None)
    first = weakref.ref(store._parts[0].arena.segments[0].array)
    sizes = []
    for i in range(400, 4000, 50):
        store.write([noise[i : i + 50]], None)
        sizes.append(store._parts[0].arena.capacity)
    gc.collect()
    assert first() is None
    assert max(sizes[20:]) < 1.2 * min(sizes[20:]) and sizes[-1] < 1.2 * store.stats()["payload_bytes"]


def test_a_slow_lane_does_not_keep_segments_alive() -> None:
    store = make(Zstd(chunk=1), shape=(40, 40), lanes=2, length=300, slack=0)
    rng = np.random.default_rng(0)
    keep = np.ones((60, 2), bool)
    keep[1:, 1] = False
    slow = []
    for _ in range(200):  # of 12,000 rows of lane 0, 300 are live, and all 200 of lane 1
        rows = rng.integers(0, 4, (60, 2, 40, 40), np.uint8)
        slow.append((store.write([rows], keep)[0, 1], rows[0, 1]))
    part = store._parts[0].arena
    assert part.capacity < 1.5 * part.live + 5 * 32 * 1024
    check_rows(store, [t for t, _ in slow], np.stack([r for _, r in slow]))


@pytest.mark.parametrize("codec", [None, Zstd()], ids=["raw", "zstd"])
def test_two_threads_read_while_one_writes(codec: Zstd | None) -> None:
    """Rows tell their own ticket: readers see them, or zeros, never a mixture."""
    store = make(codec, shape=(600,), dtype="uint64", lanes=2, length=300, slack=0)
    top, stop = [0], threading.Event()

    def read(seed: int) -> int:
        rng, seen = np.random.default_rng(seed), 0
        while not (stop.is_set() and seen):
            high = top[0]
            wanted = rng.integers(max(high - 1500, 0), high + 20, (64, 4)).astype(np.uint64)
            got, ok = fetch(store, wanted)
            there = ok.reshape(wanted.shape) & (wanted > 0)
            assert (got == np.where(there, wanted, 0)[..., None].astype(np.uint64)).all()
            seen += int(there.sum())
        return seen

    readers, rng = [Thread(read, i) for i in range(2)], np.random.default_rng(9)
    try:
        for _ in range(250):
            n = int(rng.integers(1, 40))
            expected = np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(top[0] + 1)
            assert (store.write([np.repeat(expected[..., None], 600, 2)], None) == expected).all()
            top[0] = int(expected[-1, -1])
    finally:
        stop.set()
    assert all(reader.ends() for reader in readers)
    assert isinstance(store._parts[0], ChunkedColumn if codec else RawColumn)


class Watched:
    """A decompressor that notices a second thread inside it."""

    meetings, barrier = 0, threading.Barrier(2)

    def __init__(self, **options: Any) -> None:
        self.real, self.users = REAL(**options), 0

    def decompress(self, data: Any) -> bytes:
        self.users += 1
        Watched.barrier.wait(PATIENCE)  # both threads are in some decompressor now
        Watched.meetings += self.users > 1
        Watched.barrier.wait(PATIENCE)
        self.users -= 1
        return self.real.decompress(data)


REAL = zstandard.ZstdDecompressor


@pytest.mark.parametrize("shared", [False, True], ids=["ours", "control"])
def test_threads_share_no_decompressor(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, tickets = compressible()
    Watched.meetings, Watched.barrier = 0, threading.Barrier(2)
    one = Watched()
    monkeypatch.setattr(zstd.zstandard, "ZstdDecompressor", (lambda **_: one) if shared else Watched)
    for thread in [Thread(fetch, store, tickets[:8]) for _ in range(2)]:
        thread.ends()
    assert (Watched.meetings > 0) == shared
