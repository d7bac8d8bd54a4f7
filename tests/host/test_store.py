"""Compare the host store with a dict of every row written."""

import gc
import itertools
import platform
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs import Codec, Zstd
from fbuf._host.memory import arena, file_arena
from fbuf._host.store import row_updates
from fbuf._host.store.store import Column, Store, StoreClosed
from fbuf._host.types import StoreCorrupted
from tests.support import power
from tests.support.disk_faults import check_failing_writes
from tests.support.processes import run_python
from tests.support.recovery import KINDS, check_damages, check_killed, check_power_failed
from tests.support.refusals import raises
from tests.support.replay import resident
from tests.support.store import Deflate, Failing, check_rows, compressible, fetch, frames, load, make, same
from tests.support.store_model import Drawn, Model
from tests.support.tables import checks


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data):
    drawn = Drawn(data)
    first = data.draw(st.sampled_from([0, 2**32 - 5]), "first")
    model = Model(Store(drawn.columns, **drawn.sizes, first_seq=first))
    for _ in range(data.draw(st.integers(1, 12), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
        if call in ("write", "masked"):
            n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
            model.write(drawn.rows(n), None if call == "write" else drawn.mask(n))
        elif call == "patch":
            model.patch_some(drawn)
        elif call == "reload":
            model.store = load(model.store)
        model.check(drawn.rng)


def test_updates_of_two_leaves_are_both_kept():
    store = make(None, None, length=10)
    tickets = store.write([np.ones((1, 1, 5), np.uint8)] * 2, None)[:, 0]
    for column in (0, 1):
        tickets = store.update_rows(tickets, np.array([True]), {column: np.full((1, 5), 7 + column, np.uint8)})
    assert [int(fetch(store, tickets, column=column)[0][0, 0]) for column in (0, 1)] == [7, 8]


def test_an_update_expires_with_its_row():
    store = make(Zstd(), length=10, slack=2)
    tickets = store.write([np.ones((10, 1, 5), np.uint8)], None)[:, 0]
    new = store.update_rows(tickets[:1], np.array([True]), {0: np.full((1, 5), 9, np.uint8)})
    before = store.nbytes
    store.write([np.zeros((2, 1, 5), np.uint8)], None)
    assert fetch(store, new)[1].all()
    store.write([np.zeros((1, 1, 5), np.uint8)], None)
    got, ok = fetch(store, new)
    assert not ok.any() and not got.any()
    assert store.stats()["row_updates"] == 0 and store.nbytes < before
    assert store.update_rows(new, np.array([True]), {0: np.ones((1, 5), np.uint8)}) == new


def test_strided_and_read_only_input_is_stored():
    rows = np.arange(2 * 40 * 6, dtype=np.int32).reshape(2, 6, 40).transpose(2, 0, 1)[:, :, ::2]
    rows.flags.writeable = False
    for c in (None, Zstd(chunk=4)):
        store = make(c, shape=(3,), dtype="int32", lanes=2, length=40)
        check_rows(store, store.write([rows], None), np.ascontiguousarray(rows))


def test_superseded_updates_are_dropped_after_slack_more():
    store = make(None, length=10, slack=6)
    ticket = store.write([np.ones((10, 1, 5), np.uint8)], None)[:1, 0]
    chain = [ticket]
    for i in range(200):
        chain.append(store.update_rows(chain[-1], np.array([True]), {0: np.full((1, 5), i, np.uint8)}))
    assert store.stats()["row_updates"] <= 8
    for i in range(6):  # the last is in force, those before it were replaced fewer than `slack` patches ago
        assert (fetch(store, chain[-1 - i])[0] == 199 - i).all()
    assert not fetch(store, chain[100])[1].any()
    assert (fetch(store, ticket)[0] == 1).all()


def test_a_failing_codec_leaves_the_store_unchanged():
    model, rng = Model(make(None, Zstd(chunk=2), Failing(), lanes=2, length=40)), np.random.default_rng(0)
    keep = np.arange(10).reshape(5, 2) != 1
    model.write([rng.integers(0, 9, (5, 2, 5), np.uint8) for _ in range(3)], keep)
    accepted = model.store.stats()["rows_accepted"]
    with mock.patch.object(Failing, "left", 3):  # of eight chunks
        raises(OSError, "full", model.store.write, [np.full((17, 2, 5), 77, np.uint8)] * 3, None)
    assert isinstance(model.store.last_error, OSError) and model.store.stats()["rows_accepted"] == accepted
    model.check(rng)
    model.write([rng.integers(0, 9, (9, 2, 5), np.uint8) for _ in range(3)])
    model.check(rng)


@pytest.mark.parametrize("column", [0, 1])
def test_an_interrupted_write_blocks_reads(column):
    store = make(None, Zstd(chunk=2), length=40)
    rows = [np.arange(50, dtype=np.uint8).reshape(10, 1, 5) for _ in range(2)]
    tickets = store.write(rows, None)[:, 0]
    with mock.patch.object(store._parts[column], "commit", side_effect=KeyboardInterrupt):
        pytest.raises(KeyboardInterrupt, store.write, rows, None)
    for use in (lambda: fetch(store, tickets), lambda: store.write(rows, None), store.to_arrays, store.stats):
        pytest.raises(StoreCorrupted, use).match("interrupted")
    store.close()


def test_a_failed_allocation_leaves_the_store_unchanged():
    store = make(Zstd(chunk=2), Zstd(chunk=2), shape=(1000,), length=200)
    model, rng = Model(store), np.random.default_rng(0)
    rows = [rng.integers(0, 4, (101, 1, 1000), np.uint8) for _ in range(2)]
    model.write(rows, None)
    live = [p.arena.live for p in store._parts]
    scarce = [mock.DEFAULT, mock.DEFAULT, *[MemoryError] * 9]
    with mock.patch.object(arena, "Segment", wraps=arena.Segment, side_effect=scarce):
        pytest.raises(MemoryError, lambda: store.write([r.repeat(2, 0) for r in rows], None))
    assert [p.arena.live for p in store._parts] == live
    model.check(rng)
    model.write(rows, None)
    model.check(rng)


def test_a_running_read_finishes_when_the_store_is_closed():
    class Closes(Deflate):
        def decode(self, data, out):
            store.close()
            super().decode(data, out)

    store = make(Closes(), None, length=20)
    tickets = store.write([np.full((8, 1, 5), 3, np.uint8)] * 2, None)[:, 0]
    tickets[:1] = store.update_rows(tickets[:1], np.array([True]), {0: np.full((1, 5), 9, np.uint8)})
    outs = [np.empty((8, 5), np.uint8) for _ in range(2)]
    assert store.read([(c, tickets, out) for c, out in enumerate(outs)]).all()
    assert (outs[0][0] == 9).all() and (outs[0][1:] == 3).all() and (outs[1] == 3).all()
    pytest.raises(StoreClosed, store.stats)


@pytest.mark.parametrize("streams", [True, False])
def test_rows_overwritten_during_a_read_are_missing(streams):
    slots, fewer = (None if streams else np.arange(n, dtype=np.int32)[:, None] for n in (8, 4))

    class Writes(Deflate):
        def decode(self, data, out):
            if store.stats()["rows_accepted"] == 8:
                store.write([np.full((4, 1, 5), 99, np.uint8)] * 2, None, fewer)
            super().decode(data, out)

    store = make(Writes(4 if streams else 1), None, length=8, slack=2, streams=streams)
    rows = np.arange(40, dtype=np.uint8).reshape(8, 1, 5)
    tickets = store.write([rows] * 2, None, slots)[:, 0]
    outs = [np.empty((8, 5), np.uint8) for _ in range(2)]
    ok = store.read([(c, tickets, out) for c, out in enumerate(outs)]).reshape(2, 8)
    assert ok[1].tolist() == [False] * 2 + [True] * 6  # two of four are within the slack
    for column in range(2):
        assert same(outs[column], rows[:, 0] * ok[column, :, None])


def test_close_frees_everything_and_later_calls_raise():
    store, _, tickets = compressible()
    arrays = weakref.ref(store._parts[0].arena.segments[0].array)
    store.close()
    store.close()
    gc.collect()
    assert arrays() is None
    for call in (
        lambda: fetch(store, tickets),
        lambda: store.write([np.zeros((1, 1, 24, 24), np.uint8)], None),
        lambda: store.update_rows(tickets[:1, 0], np.array([True]), {}),
        lambda: store.nbytes,
        store.stats,
        store.to_arrays,
    ):
        pytest.raises(StoreClosed, call).match("closed")


def test_a_chunk_is_decoded_once_a_call():
    store = make(Deflate(), length=40)
    tickets = store.write([np.zeros((40, 1, 5), np.uint8)], None)[:, 0]
    stack = tickets[np.arange(8, 20)[:, None] + np.arange(-3, 1)]
    outs = [np.empty((12, 4, 5), np.uint8) for _ in range(2)]
    with mock.patch.object(Deflate, "decode", autospec=True, side_effect=Deflate.decode) as decode:
        store.read([(0, stack, outs[0]), (0, stack + np.uint64(1), outs[1])])
    assert decode.call_count == 5  # rows 5 to 20 are in chunks 1 to 5


def test_codecs_and_their_settings_are_checked():
    settings = {"level": (0, 23, True), "chunk": (0, 65, 8.0), "dictionary": (-1,)}
    for name, value in ((name, value) for name, values in settings.items() for value in values):
        pytest.raises(ValueError, Zstd, **{name: value}).match(f"Zstd: {name} is .*; expected an integer from")
    assert Zstd() == Zstd(level=1, chunk=8, dictionary=16) and hash(Zstd()) == hash(Zstd())
    assert isinstance(Zstd(), Codec) and isinstance(Deflate(), Codec)
    rows = np.arange(30, dtype=np.uint8).reshape(3, 10)
    out = np.empty_like(rows)
    Zstd().decode(Zstd().encode(rows), out)
    assert same(out, rows)
    raises(TypeError, "expected chunk, encode and decode", Column, "x", (), np.dtype("uint8"), "zstd")
    with mock.patch.object(Deflate, "encode", return_value=memoryview(b"")):
        raises(TypeError, "gave memoryview; expected bytes", make(Deflate()).write, [np.zeros((4, 1, 5), "u1")], None)


@pytest.mark.more
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep what is freed")
def test_the_memory_of_a_batch_serves_the_next():
    faults = run_python(
        """
        import resource
        import numpy as np
        from fbuf._host.store.store import Column, Store

        store = Store((Column("obs", (84, 84), np.dtype(np.uint8), None),), lanes=1, length=256, slack=0)
        tickets = np.tile(store.write([np.ones((256, 1, 84, 84), np.uint8)], None), (1, 4))
        for read in range(24):
            if read == 4:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            outs = [np.empty((256, 4, 84, 84), np.uint8) for _ in range(2)]
            store.read([(0, tickets, out) for out in outs])
            del outs
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        """
    ).stdout
    assert int(faults) < 1000  # a batch has 3,500 pages


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_stays_flat_over_a_million_operations():
    store = make(Zstd(chunk=4, dictionary=4), None, shape=(16, 16), lanes=2, length=600)
    for part in store._parts:
        part.job_size = 64
    source, rng = frames(4000, 16), np.random.default_rng(0)
    known = np.zeros((0, 2), np.uint64)
    done, before = 0, 0
    while done < 1_000_000:
        at = int(rng.integers(0, 3990))
        rows = source[at : at + 2].reshape(1, 2, 16, 16)
        tickets = store.write([rows, rows], None)
        known = np.concatenate([known[-500:], tickets])
        pick = known[rng.integers(0, len(known), 4), rng.integers(0, 2, 4)]
        out, ok = fetch(store, pick, column=int(rng.integers(0, 2)))
        assert ok.all() and out.any()
        done += 2
        if done % 50 == 0:
            store.update_rows(pick[:1], np.ones(1, bool), {0: rows[0, :1]})
            done += 1
        if done >= 100_000 and not before:
            before = resident()
    if store._thread is not None:
        store._thread.join(60)
    assert resident() - before < 3  # MiB
    assert store.nbytes < 4 << 20


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_process_loses_no_row(kind, seed, tmp_path):
    check_killed(kind, tmp_path / "store", 20, seed)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", power.KINDS)
@pytest.mark.parametrize("first", range(1000, 1500, 10))
def test_flushed_rows_survive_a_power_failure_after_any_call(kind, first, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    monkeypatch.setattr(row_updates, "_LEAST", 512)
    for seed in range(first, first + 10):
        (tmp_path / str(seed)).mkdir()
        power.check_prefixes(kind, seed, tmp_path / str(seed), 60, prefixes=8, again=0.02)


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("first", range(8, 200, 16))
def test_flushed_rows_survive_a_power_failure(kind, first, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 8192)
    for seed in range(first, first + 16):
        check_power_failed(kind, seed, tmp_path / str(seed))


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("verify", [True, False], ids=["full", "lazy"])
def test_truncated_and_flipped_files_show_no_wrong_row(kind, verify, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    check_damages(kind, verify, True, tmp_path)


FAILING = itertools.product(["noise", "still"], range(5), [40])
test_a_failed_write_leaves_the_store_unchanged = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads /proc"
)(checks(exhaustive=[(check_failing_writes, FAILING)]))
