"""Rows in files: the store against a dict of every row, whatever call fails, and damage that is found."""

import errno
import itertools
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs import Zstd
from fbuf._host.store.store import UPDATE_BIT, Store
from fbuf._host.types import StoreCorrupted
from tests.support.disk import flip, make
from tests.support.disk_faults import Faults, check_failing_writes, resumed
from tests.support.refusals import raises
from tests.support.store import check_rows, columns_of, fetch, frames
from tests.support.store_model import Drawn, Model
from tests.support.tables import checks


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data, tmp_path_factory):
    tmp, drawn = tmp_path_factory.mktemp("store"), Drawn(data)
    paths = (tmp / str(number) for number in itertools.count())
    path, rng = next(paths), drawn.rng
    model = Model(make(path, drawn.columns, **drawn.sizes))
    for _ in range(data.draw(st.integers(1, 12), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "patch", "reload", "resume", "resume"]))
        if call in ("write", "masked"):
            n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
            model.write(drawn.rows(n), None if call == "write" else drawn.mask(n))
        elif call == "patch" and drawn.slack == 9 and len(model.rows) > 2:
            tickets = rng.choice(np.array([0, *model.rows], np.uint64), 3, replace=False)
            tickets = tickets[np.unique([model.origin.get(t, t) for t in tickets.tolist()], return_index=True)[1]]
            column = int(rng.integers(len(drawn.columns)))
            model.update_rows(tickets, rng.random(len(tickets)) < 0.8, {column: drawn.values(len(tickets))})
        elif call == "reload":
            arrays = {n: np.array(a) for n, a in model.store.to_arrays().items()}
            assert all(a.dtype.kind in "iu" for a in arrays.values())
            model.store.close()
            path = next(paths)
            model.store = make(path, drawn.columns, **drawn.sizes, arrays=arrays)
        elif call == "resume":
            resumed(model, path)
        model.check(rng)
    shutil.rmtree(tmp)


test_a_failed_write_leaves_the_store_unchanged = checks(
    (check_failing_writes, [("still", 0, 20)]), more=[(check_failing_writes, [("noise", 0, 20)])]
)


def test_a_failed_update_leaves_the_store_unchanged(tmp_path, monkeypatch):
    faults = Faults(monkeypatch)
    model = Model(make(tmp_path, columns_of(None, None), length=30, slack=33))
    rng = np.random.default_rng(0)
    model.write([rng.integers(0, 9, (30, 1, 5), np.uint8) for _ in range(2)], None)
    for number in range(6):
        tickets = np.arange(1 + number, 4 + number, dtype=np.uint64)
        for call in itertools.count():
            before, faults.left = (tmp_path / "changes").read_bytes().rstrip(b"\0"), call
            try:
                model.update_rows(tickets, np.ones(3, bool), {number % 2: rng.integers(0, 9, (3, 5), np.uint8)})
            except OSError as error:
                assert "cannot write" in str(error)
            else:
                break
            assert (tmp_path / "changes").read_bytes().rstrip(b"\0") == before
            model.check(rng)
        assert call >= 2  # of the log and the head
        faults.left = -1
        if number % 2:  # a failure comes after a change that the log has
            resumed(model, tmp_path)
        model.check(rng)
    assert model.origin


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("fields", [{0: np.full((3, 5), 200, np.uint8)}, {}], ids=["rows", "cuts"])
def test_an_update_that_raised_never_appears(tmp_path, monkeypatch, before, fields):
    columns = columns_of(None, None)
    store = make(tmp_path, columns)
    tickets = store.write([np.full((6, 1, 5), 7, np.uint8)] * 2, None)[:, 0]
    rows = np.full((1, 5), 100, np.uint8)
    for i in range(before):
        store.update_rows(tickets[3 + i :][:1], np.ones(1, bool), {0: rows})
    log = (tmp_path / "changes").stat().st_size
    real = os.pwrite

    def failing(fd, data, at):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("head"):
            raise OSError(errno.EIO, "injected")
        return real(fd, data, at)

    with monkeypatch.context() as patch:  # the head is not written, and the record not taken back
        patch.setattr(os, "pwrite", failing)
        patch.setattr(os, "ftruncate", lambda *_: failing(store._folder._head.fd, b"", 0))
        raises(OSError, "cannot write", store.update_rows, tickets[:3], np.ones(3, bool), fields)
    assert (tmp_path / "changes").stat().st_size > log
    made = {3 + i for i in range(before)}
    for more in (None, 5, 4):  # nor is it taken for one of the updates to come
        updated = store.newest()[1][:6, 0] >= UPDATE_BIT
        assert set(np.flatnonzero(updated).tolist()) == made
        store.close()
        store = make(tmp_path, columns, resume=True)
        assert set(np.flatnonzero(store.newest()[1][:6, 0] >= UPDATE_BIT).tolist()) == made
        if more is not None:
            store.update_rows(store.newest()[1][more : more + 1, 0], np.ones(1, bool), {1: rows})
            made.add(more)
    store.close()


def test_the_update_log_stays_short(tmp_path):
    model = Model(make(tmp_path, columns_of(None, shape=(4000,)), length=8, slack=8))
    rng = np.random.default_rng(0)
    model.write([rng.integers(0, 9, (8, 1, 4000), np.uint8)], None)
    tickets = np.array(model.lanes[0][:4], np.uint64)  # the oldest too
    for _ in range(300):
        tickets = model.store.update_rows(tickets, np.ones(4, bool), {0: rng.integers(0, 9, (4, 4000), np.uint8)})
    last, _ = fetch(model.store, tickets)
    assert (tmp_path / "changes").stat().st_size < 3 << 20  # 4.8 MB were written
    model.store.close()
    store = make(tmp_path, columns_of(None, shape=(4000,)), length=8, slack=8, resume=True)
    check_rows(store, store.newest()[1][:4, 0], last)


@pytest.mark.parametrize("verb", ["init", "resume"])
def test_a_failed_open_leaves_the_directory_usable(verb, tmp_path, monkeypatch):
    faults = Faults(monkeypatch)
    columns = columns_of(None, Zstd(chunk=2))
    if verb == "resume":
        store = make(tmp_path, columns)
        ticket = store.write([np.full((5, 1, 5), i, np.uint8) for i in range(2)], None)
        store.close()
    for number in itertools.count():
        faults.left = number
        try:
            store = make(tmp_path, columns, resume=verb == "resume")
        except OSError as error:
            assert "cannot" in str(error) or "injected" in str(error)
        else:
            if faults.left >= 0:  # no call was left to fail
                break
            store.close()
            if verb == "init":
                shutil.rmtree(tmp_path)
        assert number < 100
    assert number >= (5 if verb == "init" else 4)
    faults.left = -1
    if verb == "resume":
        assert fetch(store, ticket)[1].all()


def test_a_large_batch_is_written_in_parts(tmp_path, monkeypatch):
    columns = columns_of(None)
    store = make(tmp_path, columns, length=100, slack=0)
    rows = np.arange(600, dtype=np.uint32).view(np.uint8).reshape(600, 1, 4)[:, :, [0, 1, 2, 3, 0]]
    calls, real = [], Store._write
    monkeypatch.setattr(Store, "_write", lambda self, r, k: calls.append(len(r[0])) or real(self, r, k))
    first = store.write([rows[:110]], None)
    assert calls == [110]  # the file is longer than 100 rows: nothing is overwritten yet
    second = store.write([rows[110:300]], None)
    assert len(calls) > 2 and max(calls[1:]) <= 116 - 100 and second[-1, 0] == first[0, 0] + 299
    check_rows(store, second[-100:, 0], rows[200:300, 0])
    # A later piece that fails: the rows it would have overwritten are there, those of earlier pieces have expired.
    faults = Faults(monkeypatch)
    faults.left = 2 * 3  # rows, their checksums and the head, twice
    raises(OSError, "The first 32 of 90 rows were written before", store.write, [rows[300:390]], None)
    got, ok = fetch(store, second[-100:, 0])
    assert ok.tolist() == [False] * 32 + [True] * 68
    np.testing.assert_array_equal(got[32:], rows[232:300, 0])


@pytest.mark.parametrize("name", ["head", "column0.open", "changes", "dictionary", "manifest.json"])
def test_shared_damage_is_found_at_open(name, tmp_path):
    columns = columns_of(Zstd(chunk=4), shape=(24, 24))
    store = make(tmp_path, columns, length=800)
    tickets = store.write([frames(802)[:, None]], None)
    store.update_rows(tickets[-2:, 0], np.ones(2, bool), {0: frames(2, seed=1)})
    store.close()
    if name == "dictionary":
        (name,) = {p.name for p in tmp_path.glob("column0.dictionary-*")}
    path, settings = tmp_path / name, {"length": 800, "resume": True, "verify": False}
    size = path.stat().st_size
    places = range(0, size, max(size // 50, 1))
    flip(path, *{"column0.open": range(16), "head": [3, 4096 + 3]}.get(name, places), by=255)
    raises((StoreCorrupted, ValueError), "damaged|bytes were", make, tmp_path, columns, **settings)
    os.truncate(path, size // 3)
    raises((StoreCorrupted, ValueError, OSError), None, make, tmp_path, columns, **settings)
