"""What a store hands out to be saved: it stays what it was, its marks tell the truth, and it is never all in memory."""

import dataclasses
import gc
import itertools
import threading
import tracemalloc
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbuf._host.columns import frame_stream, recompress
from fbuf._host.columns.raw import DirtyBlocks
from fbuf._host.memory import arena, file_arena, lazy_array
from fbuf._host.memory.lazy_array import Identity, steps
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.store import Records
from fbuf._host.ragged.values import MISSING
from fbuf._host.store.store import UPDATE_BIT
from fbuf._host.types import StoreCorrupted
from tests.support.disk import make
from tests.support.snapshots import CASES, Life, blocks_of, check_marks, whole
from tests.support.store import Deflate, fetch
from tests.support.tables import by_tier
from tests.support.threads import PATIENCE, Thread, soon


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module, name, value in (
        (lazy_array, "BLOCK_BYTES", 2048),
        (arena.Arena, "small", 2048),
        (arena, "_LARGE", 4096),
        (arena, "_PART", 4096),
        (arena, "_SLAB", 8192),
        (file_arena.FileArena, "small", 16_384),
        (file_arena, "_LEAST_PART", 4096),
        (arena, "_AT_ONCE", 4096),
        (frame_stream, "_AT_ONCE", 1),
        (recompress, "JOB_BYTES", 1 << 16),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(recompress, "start", lambda store: threading.current_thread())  # when it is asked for


EVERY = pytest.mark.parametrize("case", by_tier(*CASES[:2], *CASES[4::5], more=CASES), ids=lambda case: case.name)
CALLS = ["write", "write", "masked", "patch", "repack", "wrap"]


@EVERY
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(st.sampled_from(CALLS), max_size=6),
    more=st.lists(st.sampled_from(CALLS), max_size=4),
    seed=st.integers(0, 99),
)
def test_marks_tell_the_truth_and_snapshots_stay(case, calls, more, seed, tmp_path_factory):
    life = Life(case, tmp_path_factory.mktemp("store") / "a", seed)
    for call in ["write", "wrap", *calls]:
        life.step(call)
    before, same = life.store.to_arrays(), life.store.to_arrays()
    first = whole(before)
    alike, number = check_marks(before, same)
    assert alike == number > 0  # nothing was written in between
    for call in more:
        life.step(call)
    after = life.store.to_arrays()
    check_marks(before, after)
    assert whole(before) == whole(same) == first
    life.store.close()
    assert whole(before) == first


@EVERY
def test_what_is_loaded_is_the_store_and_its_next_save_the_same(case, tmp_path):
    life = Life(case, tmp_path / "a", 3)
    for call in ["write", "wrap", "patch", "repack", "wrap", "masked", "patch", "write"]:
        life.step(call)
    arrays = life.store.to_arrays()
    loaded = case.make(tmp_path / "b", arrays)  # block by block
    plain = case.make(tmp_path / "c", {n: np.array(a) for n, a in arrays.items()})
    tickets = np.array(life.tickets, np.uint64)
    rows, ok = fetch(life.store, tickets)
    assert ok.any() and not ok.all()
    stores = [loaded, plain]
    if case.files or case.name in ("ring", "zstd", "own"):  # from files into memory, or into files, and back
        other = dataclasses.replace(case, files=not case.files)
        stores.append(other.make(tmp_path / "d", arrays))
        stores.append(case.make(tmp_path / "e", stores[-1].to_arrays()))
    for store in stores:
        again, there = fetch(store, tickets)
        assert np.array_equal(there, ok) and np.array_equal(again, rows)
    for store, name in zip(stores[2:], "de", strict=False):
        if (store is stores[-1]) == case.files:  # it is in files
            count = store._count.copy()
            store.close()
            store = make(tmp_path / name, case.columns(), **case.sizes, resume=True)
            assert np.array_equal(store._count, count)
            streamed = tickets < UPDATE_BIT
            assert np.array_equal(fetch(store, tickets[streamed])[0], rows[streamed])
    twice = loaded.to_arrays()
    assert check_marks(arrays, twice)[0] == 0  # no mark is another store's
    if not case.files:  # but the bytes are: what is saved of it to the same path is nothing
        assert whole(twice) == whole(arrays)
        assert all(getattr(twice[n], "keys", None) == getattr(a, "keys", None) for n, a in arrays.items())
    more = np.stack(list(itertools.islice(life.game, 5 * case.lanes))).reshape(5, case.lanes, *case.shape)
    slots = None if case.streams else np.arange(5 * case.lanes, dtype=np.int32).reshape(5, -1)
    new = loaded.write([more], None, slots)
    assert np.array_equal(new, life.store.write([more], None, slots))
    assert np.array_equal(fetch(loaded, new)[0], more)
    change = new[:3, 0], np.ones(3, bool), {0: more[:3, 0]}
    assert np.array_equal(loaded.update_rows(*change), life.store.update_rows(*change))
    own = {n: life.store.stats()[n] for n in ("rows_live", "rows_accepted", "chunks", "raw_bytes", "row_updates")}
    assert own == {n: loaded.stats()[n] for n in own}


@EVERY
def test_little_of_what_was_saved_changes(case, tmp_path):
    life = Life(dataclasses.replace(case, length=500), tmp_path / "a", 7)
    for _ in range(3):
        life.write(200, 1)
    before = life.store.to_arrays()
    life.write(5, 1)
    after = life.store.to_arrays()
    large = [n for n, a in after.items() if len(blocks_of(a)) > 3]
    alike, number = check_marks(before, {n: after[n] for n in large})
    assert number > 10 and alike >= 0.8 * number, (alike, number)


def test_little_of_the_index_of_chunks_changes(tmp_path):
    life = Life(dataclasses.replace(CASES[1], length=500), tmp_path / "a", 7)
    for _ in range(3):
        life.write(200, 1)
    before = life.store.to_arrays()["column0:address"]
    life.write(5, 1)
    after = life.store.to_arrays()["column0:address"]
    blocks = [slice(start, start + after.block) for start in range(0, *after.shape[:1], after.block)]
    changed = sum(not np.array_equal(before[block], after[block]) for block in blocks)
    assert len(blocks) >= 8 and 1 <= changed <= 3


@EVERY
def test_a_snapshot_is_read_while_others_write(case, tmp_path):
    life = Life(case, tmp_path / "a", 11)
    for call in ("write", "wrap", "patch"):
        life.step(call)
    stop, pace = threading.Event(), threading.Semaphore(0)

    def repeat(work):
        while pace.acquire(timeout=PATIENCE) and not stop.is_set():
            work()

    calls = lambda: life.step(str(life.rng.choice(CALLS)))  # noqa: E731
    threads = [Thread(repeat, calls), Thread(repeat, lambda: fetch(life.store, np.uint64(life.tickets[-50:])))]
    loads = []
    try:
        for turn in range(3):
            arrays = life.store.to_arrays()
            plain = {}
            for name, array in arrays.items():  # as a saver does, block by block
                pace.release(8)  # others write meanwhile, but not so much that the test takes long
                found = [np.array(rows) for _, rows in steps(array)]
                plain[name] = np.concatenate(found) if found else np.array(array)
                soon(lambda: not pace._value)
            assert whole(arrays) == whole(plain)
            loads.append(dataclasses.replace(case, files=False).make(tmp_path / str(turn), plain))
    finally:
        stop.set()
        pace.release(len(threads))
    for thread in threads:
        thread.ends()
    every = np.array(list(life.rows), np.uint64)
    for loaded in loads:
        rows, there = fetch(loaded, every)
        assert np.count_nonzero(there & (every < UPDATE_BIT)) == loaded.stats()["rows_live"] > 0
        for at in np.flatnonzero(there).tolist():
            assert rows[at].tobytes() == life.rows[int(every[at])]


def test_a_snapshot_of_rows_that_are_written_over_keeps_them_and_no_more():
    table = np.zeros((64, 1024), np.uint8)
    tracked = DirtyBlocks(64, 1024)
    assert tracked.block == 2

    def take():
        return tracked.snapshot((60, 1024), np.uint8, lambda a, b: table[a:b].copy())

    first = take()
    tracemalloc.start()
    for row in range(0, 8):
        tracked.touch(row, row + 1)
        table[row] = 1
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 8 * 1024 <= kept < 12 * 1024
    assert not first[0:60].any() and not np.asarray(first).any()
    second = take()
    assert [a == b for a, b in zip(first.marks or (), second.marks or (), strict=True)] == [False] * 4 + [True] * 26
    tracked.touch_at(np.array([5, 63, 59]))
    table[[5, 63, 59]] = 2
    assert second[5:6].all() and not second[58:60].any() and not first[4:6].any()
    del first, second
    gc.collect()
    tracked.touch(0, 64)
    assert tracked._snapshots == []


@pytest.mark.parametrize("error", [MemoryError(), OSError("broken"), StoreCorrupted("damaged")], ids=repr)
def test_what_cannot_be_kept_is_the_savers_to_hear_of(error):
    tracked = DirtyBlocks(8, 1024)
    read = mock.Mock(side_effect=lambda start, stop: np.zeros((stop - start, 1024), np.uint8))
    snapshot = tracked.snapshot((8, 1024), np.uint8, read)
    with mock.patch.object(read, "side_effect", error):
        tracked.touch(0, 1)
    pytest.raises(type(error), lambda: snapshot[4:5]).match("save again|broken|damaged")


def test_marks_of_a_fork_are_others(monkeypatch):
    names = Identity(), Identity()
    before = {str(n) for n in names}
    assert len(before) == 2 and before == {str(n) for n in names}
    monkeypatch.setattr(Identity, "_process", Identity._process)  # restored in the end
    Identity.renew()
    assert not before & {str(n) for n in names}


def peak(work):
    gc.collect()
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("files", by_tier(True, more=[False], ids=lambda files: "files" if files else "memory"))
@pytest.mark.parametrize("codec", [None, Deflate(chunk=8)], ids=["ring", "chunks"])
def test_a_save_and_a_load_hold_little(codec, files, tmp_path, monkeypatch):
    monkeypatch.undo()  # real sizes
    case = dataclasses.replace(CASES[0], codec=codec, shape=(64, 64), lanes=1, files=files, length=6000)
    store = case.make(tmp_path / "a")
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.integers(0, 256, (1, 1, 64, 64), np.uint8), 250, 0)
    for _ in range(24):
        rows[:, 0, :24] = rng.integers(0, 64, (250, 24, 64))
        store.write([rows], None)

    def save():
        total = 0
        for array in store.to_arrays().values():
            cuts = getattr(array, "cuts", None)
            parts = (array[a:b] for a, b in itertools.pairwise(cuts)) if cuts else (r for _, r in steps(array))
            total += sum(len(np.ascontiguousarray(part).tobytes()) for part in parts)
        return total

    held, total = peak(save)
    assert total > 4_000_000 and held < 0.1 * total + (2 << 20), (held, total)
    arrays = store.to_arrays()
    held, loaded = peak(lambda: case.make(tmp_path / "b", arrays))
    if codec is not None and not files:  # addresses before large pages take no memory
        held -= -(-total // arena._SLAB) * arena._LARGE_PAGE
    copies = arena._READERS * arena._SLAB  # these sources are copied slab by slab
    assert held - (0 if files else loaded.nbytes) < 0.1 * total + copies + (1 << 19), (held, loaded.nbytes, total)
    assert loaded.nbytes < 1.1 * store.nbytes + (1 << 20)
    got, ok = fetch(loaded, [5751, 6000])
    assert ok.all() and np.array_equal(got, rows[[0, 249], 0])


LEAVES = (RaggedLeaf("a", "array", "<f4", (9,)), RaggedLeaf("b", "text"))


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(1, 80), more=st.lists(st.sampled_from([1, 4, 40]), max_size=4))
def test_records_stay_and_load_too(first, more):
    store, rng, tickets = Records(LEAVES, lanes=2, length=60, slack=9), np.random.default_rng(0), []

    def write(number):
        values = [
            [rng.random(int(rng.integers(1, 10))).astype(np.float32) for _ in range(2 * number)],
            [MISSING if i % 5 == 0 else "x" * int(rng.integers(0, 90)) for i in range(2 * number)],
        ]
        tickets.extend(store.put(values, number, None).reshape(-1).tolist())

    write(first)
    before = store.to_arrays()
    now = whole(before)
    for number in more:
        write(number)
    after = store.to_arrays()
    check_marks(before, after)
    assert whole(before) == now
    loaded = Records.from_arrays(after, lanes=2, length=60, slack=9)
    every = np.array(tickets, np.uint64)
    for leaf in range(2):
        (own, ok), (other, there) = store.values(leaf, every), loaded.values(leaf, every)
        assert np.array_equal(ok, there)
        assert all(a is b or np.array_equal(a, b) for a, b in zip(own, other, strict=True))
    assert whole(loaded.to_arrays()) == whole(after)
