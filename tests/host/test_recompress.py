"""Test that recompressed chunks hold the same rows in fewer bytes, under failures too."""

import gc
import itertools
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs import Zstd
from fbuf._host.columns import recompress
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.store.store import Column, Store
from fbuf._host.types import StoreCorrupted
from tests.support import store as stores
from tests.support.store import check_rows as check
from tests.support.store import fetch, frames
from tests.support.threads import PATIENCE


def make(lanes=1, length=4096, slack=0, **settings):
    return stores.make(Zstd(**settings), shape=(24, 24), lanes=lanes, length=length, slack=slack)


def write(store, rows):
    return store.write([rows[:, None]], None)[:, 0]


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(recompress, "start", lambda store: threading.current_thread())


def test_recompression_shrinks_a_game_and_keeps_its_rows():
    store, rows = make(), frames(4096)
    tickets = write(store, rows)
    before, books = store.stats(), list(store._parts[0].table.values())
    store.repack()
    after = store.stats()
    assert after["payload_bytes"] < 0.8 * before["payload_bytes"]
    assert after["nbytes"] < before["nbytes"]
    assert after["dictionaries"] == 1 and not set(books) & set(store._parts[0].table.values())
    check(store, tickets, rows)
    store.repack()  # nothing is left to do
    assert store.stats() == after
    part = store._parts[0]
    assert list(part.table.values()) == [part.coder.current]
    check(store, write(store, rows[:512]), rows[:512])
    assert store.stats()["dictionaries"] == 1


def test_a_dictionary_that_saves_less_than_it_takes_is_not_chosen():
    store, rows = make(dictionary=16), np.random.default_rng(0).integers(0, 9, (512, 24, 24), np.uint8)
    rows[::8, :4] = rows[0, :4]  # 96 bytes that all chunks share
    write(store, rows)
    part = store._parts[0]
    job = part.next_job(store._count, 1)
    part.packer.pack(job, part.read_job(job, part.packer.wanted(job)))
    assert job.chosen and job.new is None


def test_writes_keep_a_dictionary_that_chunks_need():
    store, rows = make(), frames(4096)
    part = store._parts[0]
    tickets = write(store, rows[:2048])
    current, least = part.coder.current, part.next_job(store._count, 1)
    store._jobs = [least]
    tickets = np.concatenate([tickets, write(store, rows[2048:])])
    while store._jobs:
        store.repack_some(least=1)
    assert least.new is not None and part.coder.current is current and current.count
    check(store, tickets, rows)


@pytest.mark.more
@given(st.data())
def test_any_order_of_writes_and_jobs_keeps_every_row(data):
    lanes = data.draw(st.integers(1, 3))
    codec = {"chunk": data.draw(st.integers(1, 5)), "dictionary": data.draw(st.sampled_from([0, 2]))}
    store = make(lanes, length=60, slack=data.draw(st.integers(0, 20)), **codec)
    store._parts[0].job_size = data.draw(st.integers(1, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    source = frames(4000)
    known = [{} for _ in range(lanes)]
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            n = data.draw(st.integers(1, 40))
            rows = source[rng.integers(0, 4000, (n, lanes))]
            keep = rng.random((n, lanes)) < 0.8 if data.draw(st.booleans()) else None
            tickets = store.write([rows], keep)
            for i, e in np.argwhere(tickets > 0).tolist():
                known[e][int(tickets[i, e])] = rows[i, e]
        elif data.draw(st.booleans()):
            store.repack()
        else:
            store.repack_some(least=1)
    for lane in known:
        alive = list(lane)[-store.depth :]
        out, ok = fetch(store, list(lane))
        for ticket, row, there in zip(lane, out, ok, strict=True):
            assert there == (ticket in alive)
            assert np.array_equal(row, lane[ticket] if there else np.zeros_like(row))
    live = store._parts[0]
    if isinstance(live, ChunkedColumn):  # rows one by one without a dictionary may turn out not to compress
        assert sum(d.count for d in live.table.values()) <= store.stats()["chunks"]


def test_a_damaged_chunk_stays_damaged_and_others_intact():
    store, rows = make(), frames(2048)
    tickets = write(store, rows)
    part = store._parts[0]
    bad = 100  # a chunk
    part.arena.view(int(part.address[bad, 0]), int(part.length[bad, 0]))[9] ^= 1
    store.repack()
    pytest.raises(StoreCorrupted, fetch, store, tickets[bad * 8 : bad * 8 + 8])
    others = np.delete(np.arange(2048), slice(bad * 8, bad * 8 + 8))
    check(store, tickets[others], rows[others])


@pytest.mark.parametrize("where", ["compressor", "append", "Dictionary"])
def test_a_failed_job_keeps_every_row(where):
    rows = frames(1024)
    for failing in range(0, 60, 7 if where == "compressor" else 1):
        store = make(length=1024)
        tickets = write(store, rows)
        owner = store._parts[0].arena if where == "append" else recompress
        effects = itertools.chain([mock.DEFAULT] * failing, [MemoryError], itertools.repeat(mock.DEFAULT))
        with mock.patch.object(owner, where, side_effect=effects, wraps=getattr(owner, where)) as call:
            try:
                store.repack()
            except MemoryError:
                assert where != "append"
        check(store, tickets, rows)
        store.repack()
        check(store, tickets, rows)
        if call.call_count <= failing:
            return
    assert where == "compressor"


@pytest.mark.more
def test_a_thread_compresses_while_rows_are_written_and_read(monkeypatch):
    monkeypatch.undo()  # with its thread
    monkeypatch.setattr(recompress, "_DUTY_CYCLE", 1.0)
    store, rows = make(lanes=2, length=3000), frames(6000)
    store._parts[0].job_size = 64
    tickets = []
    for at in range(0, 6000, 50):
        tickets.append(store.write([np.stack([rows[at : at + 50], rows[at : at + 50]], 1)], None))
        known = np.concatenate(tickets)[-2900:]
        pick = np.random.default_rng(at).integers(0, len(known), 40)
        check(store, known[pick, at // 50 % 2], rows[at + 50 - len(known) + pick])
    store._thread.join(60)
    assert not store._thread.is_alive()
    part = store._parts[0]
    assert part._waiting(store._count, None) < 64 and part.packed.min() > 0
    out, ok = fetch(store, np.concatenate(tickets)[-3000:])
    assert ok.all() and np.array_equal(out[:, 1], rows[-3000:])


def test_the_thread_ends_with_its_store(monkeypatch):
    reached, go = threading.Event(), threading.Event()
    real = Store.repack_some

    def slow(self, least=None):
        reached.set()
        assert go.wait(PATIENCE)
        return real(self, least)

    monkeypatch.undo()
    monkeypatch.setattr(Store, "repack_some", slow)
    store = make()
    store._parts[0].job_size = 8
    write(store, frames(512))
    thread, gone = store._thread, weakref.ref(store)
    assert thread.daemon and reached.wait(PATIENCE)
    store.close()
    del store
    go.set()
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and gone() is None


def test_a_loaded_store_has_no_job_and_no_unused_dictionary():
    store, rows = make(), frames(2048)
    tickets = write(store, rows)
    part = store._parts[0]
    current = part.coder.current
    store.repack()
    assert current.count == 0
    (other,) = part.table.values()
    part.coder.current, current.slot = current, other.slot  # as when a dictionary was evicted, and its slot reused
    loaded = Store.from_arrays(store.columns, store.to_arrays(), lanes=1, length=4096, slack=0)
    assert loaded._parts[0]._waiting(loaded._count, None) == 0
    check(loaded, tickets, rows)


def test_other_codecs_are_not_recompressed():
    for settings in ({"repack": False}, {"level": 9}):
        store = make(**settings)
        store._parts[0].job_size = 1
        write(store, frames(512))
        before = store.stats()
        store.repack()
        assert store.stats() == before and store._thread is None
    pytest.raises(ValueError, Zstd, repack=3).match("repack is 3; expected True or False")


def test_frames_of_stacks_are_recompressed():
    source = frames(3000)
    stacks = np.stack([source[i : i + 2990] for i in range(4)], axis=1)
    column = Column("stack", (4, 24, 24), np.dtype(np.uint8), Zstd(), stacks=True)
    store = Store((column,), lanes=1, length=2000, slack=0)
    tickets = np.concatenate([write(store, stacks[i : i + 70]) for i in range(0, 2990, 70)])
    before = store.stats()
    store.repack()
    assert store.stats()["payload_bytes"] < 0.9 * before["payload_bytes"]
    check(store, tickets[-2000:], stacks[-2000:])
    more = write(store, stacks[:50])
    check(store, more, stacks[:50])


@pytest.mark.parametrize("ahead", [1, 2, 5, 30])
def test_a_chunk_that_expires_during_a_job_is_freed_once(ahead):
    store, rows = make(length=160), frames(2000)
    part = store._parts[0]
    tickets = [write(store, rows[:160])]
    job = part.next_job(store._count, 1)
    for _ in range(2):  # its dictionary first
        piece = part.packer.pack(job, part.read_job(job, part.packer.wanted(job)))
    assert piece.at
    at = 160
    for _ in range(ahead):
        tickets.append(write(store, rows[at : at + 8]))
        at += 8
    part.replace_chunks(job, piece)
    lane, chunk = part.live(store._count)
    assert part.arena.live == part.length[chunk % part.ring, lane].sum()
    assert len(lane) == sum(s.chunks for s in part.arena.segments.values())
    for _ in range(60):
        tickets.append(write(store, rows[at : at + 8]))
        at += 8
        check(store, np.concatenate(tickets)[-160:], rows[at - 160 : at])
