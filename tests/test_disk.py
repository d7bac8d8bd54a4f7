"""Rows in files: the store against a dict of every row, whatever fails, whoever is killed; and the folder it keeps.

Fault injection replaces `os.pwrite`, `os.open` and `os.ftruncate` by ones whose n-th call fails, for every n, half-way through
where it writes: the store is then as before, here and for whoever resumes it.
"""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host import filearena
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.codec import Zstd
from fbuf._host.filechunks import FileChunks
from fbuf._host.filering import FileRing
from fbuf._host.folder import Folder
from fbuf._host.store import Column, Store
from tests.disk import Deflate, columns_of, fetch, identity, killable, make, numbered
from tests.test_store import DTYPES, Model, frames


def resumed(model: Model, path: Any) -> Store:
    """Opens the store that a model describes anew; of the tickets of changed rows only the last are left."""
    old = model.store
    settings = {"lanes": old.lanes, "length": old.length, "slack": old.slack}
    columns = old.columns
    old.close()
    store = make(path, columns, **settings, resume=True)
    alive = model.live()
    last: dict[int, int] = {}
    for ticket, origin in model.origin.items():
        last[origin] = max(ticket, last.get(origin, 0))
    for ticket in [t for t in model.origin if t not in last.values() or t not in alive]:
        del model.origin[ticket], model.rows[ticket]
    model.store = store
    count, newest = store.newest()
    assert count.tolist() == [len(lane) for lane in model.lanes]
    for e, lane in enumerate(model.lanes):
        expected = [last.get(t, t) for t in lane][-store.length :]
        first = len(lane) - len(expected)
        got = {(first + i) % store.length: t for i, t in enumerate(expected)}
        assert [got.get(i, 0) for i in range(store.length)] == newest[:, e].tolist()
    return store


CODECS = [None, Zstd(), Zstd(chunk=1), Zstd(chunk=3, dictionary=0), Deflate()]


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject, tmp_path_factory: Any) -> None:
    tmp = tmp_path_factory.mktemp("store")
    lanes = data.draw(st.integers(1, 4), "lanes")
    length, slack = data.draw(st.integers(1, 30), "length"), data.draw(st.sampled_from([0, 4, 9, 9]), "slack")
    shape = data.draw(st.sampled_from([(), (7,), (2, 3), (0,)]), "shape")
    chosen = data.draw(st.lists(st.sampled_from(CODECS), min_size=1, max_size=3), "codecs")
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
    columns = columns_of(*chosen, shape=shape, dtype=dtype)
    numbers = itertools.count()
    path = tmp / "0"
    store = make(path, columns, lanes=lanes, length=length, slack=slack)
    model = Model(store, length + slack, lanes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))

    def values(*lead: int) -> np.ndarray:
        return (rng.integers(0, 2, (*lead, *shape)) * rng.integers(1, 99)).astype(dtype)

    for _ in range(data.draw(st.integers(1, 12), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "patch", "reload", "resume", "resume"]))
        if call in ("write", "masked"):
            n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
            keep = None if call == "write" else rng.random((n, lanes)) < rng.choice([0.0, 0.1, 0.8])
            model.write([values(n, lanes) for _ in chosen], keep)
        elif call == "patch" and slack == 9 and len(model.rows) > 2:
            known = np.array([0, *model.rows], np.uint64)
            tickets = rng.choice(known, 3, replace=False).astype(np.uint64)
            tickets = tickets[np.unique([model.origin.get(t, t) for t in tickets.tolist()], return_index=True)[1]]
            model.patch(tickets, rng.random(len(tickets)) < 0.8, {int(rng.integers(len(chosen))): values(len(tickets))})
        elif call == "reload":
            arrays = {n: np.array(a) for n, a in model.store.to_arrays().items()}
            assert all(a.dtype.kind in "iu" for a in arrays.values())
            model.store.close()
            path = tmp / f"{next(numbers) + 1}"
            model.store = make(path, columns, lanes=lanes, length=length, slack=slack, arrays=arrays)
        elif call == "resume":
            resumed(model, path)
        model.check(rng)
    shutil.rmtree(tmp)


@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_arrays_of_a_store_in_memory_load_into_files_and_back(tmp_path: Path, zstd: Zstd | None) -> None:
    columns, settings = columns_of(zstd, shape=(24, 24)), {"lanes": 2, "length": 600, "slack": 4}
    memory = Store(columns, **settings)
    rows = np.stack([frames(900, seed=i) for i in range(2)], 1)
    tickets = np.concatenate([memory.write([rows[i : i + 50]], None) for i in range(0, 900, 50)])
    disk = make(tmp_path / "a", columns, **settings, arrays=memory.to_arrays())
    disk.close()
    disk = make(tmp_path / "a", columns, **settings, resume=True)
    back = Store.from_arrays(columns, disk.to_arrays(), **settings)
    for store in (memory, disk, back):
        got, ok = fetch(store, tickets)
        assert ok.reshape(tickets.shape)[-604:].all() and not ok.reshape(tickets.shape)[:-604].any()
        np.testing.assert_array_equal(got[-604:], rows[-604:])
    if zstd is not None:
        assert disk.stats()["dictionaries"] >= 1 and disk.stats()["payload_bytes"] < rows[-604:].nbytes / 10


# -------------------------------------------------------------------------------------------------- what fails


class Faults:
    """Makes the n-th call of the file system fail; a write does half of its work first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for name in ("pwrite", "open", "ftruncate", "replace"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
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


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
@pytest.mark.parametrize("rows", ["noise", "still"])
def test_a_write_that_fails_at_any_call_leaves_the_store_as_it_was(
    rows: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise does not compress, so a column with a codec becomes a ring, in the very write that may fail."""
    monkeypatch.setattr(filearena, "_SMALL", 8192)  # several segments
    faults = Faults(monkeypatch)
    source = {"noise": NOISE, "still": STILL}[rows]
    columns = columns_of(None, Zstd(chunk=4), shape=(400,))
    rng = np.random.default_rng(seed)
    model = Model(make(tmp_path, columns, lanes=2, length=30, slack=3), 33, 2)
    failed = 0
    for step in range(40):
        n = int(rng.integers(1, 17))
        batch = [source[rng.integers(0, 400, n)] for _ in columns]
        keep = None if rng.random() < 0.5 else rng.random((n, 2)) < 0.7
        for number in itertools.count(int(rng.integers(0, 2))):
            faults.left = number
            try:
                model.write(batch, keep)
            except OSError as error:
                failed += 1
                assert "bytes are free there. Make room in" in str(error) and str(tmp_path) in str(error)
                faults.left = -1
                model.check(rng)  # every row that was there, and no other
                if rng.random() < 0.2:
                    resumed(model, tmp_path)  # and for whoever comes after
                    model.check(rng)
            else:
                faults.left = -1
                break
        model.check(rng)
        if step % 7 == 0:
            resumed(model, tmp_path)
            model.check(rng)
    assert failed > 40
    assert isinstance(model.store._parts[1], FileRing if rows == "noise" else FileChunks)


def test_a_patch_that_fails_at_any_call_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(monkeypatch)
    model = Model(make(tmp_path, columns_of(None, None), length=30, slack=33), 63, 1)
    rng = np.random.default_rng(0)
    model.write([rng.integers(0, 9, (30, 1, 5), np.uint8) for _ in range(2)], None)
    for number in range(6):
        faults.left = number % 2
        tickets = np.arange(1 + number, 4 + number, dtype=np.uint64)
        args = tickets, np.ones(3, bool), {number % 2: rng.integers(0, 9, (3, 5), np.uint8)}
        if number % 2 == 0:
            with pytest.raises(OSError, match="cannot write"):
                model.patch(*args)
        else:
            faults.left = -1
            model.patch(*args)
        faults.left = -1
        model.check(rng)
        resumed(model, tmp_path)
        model.check(rng)
    assert model.origin


def test_the_log_of_changes_stays_short(tmp_path: Path) -> None:
    model = Model(make(tmp_path, columns_of(None, shape=(4000,)), length=8, slack=8), 16, 1)
    rng = np.random.default_rng(0)
    model.write([rng.integers(0, 9, (8, 1, 4000), np.uint8)], None)
    tickets = np.array(model.lanes[0][-4:], np.uint64)
    for _ in range(300):
        tickets = model.store.patch(tickets, np.ones(4, bool), {0: rng.integers(0, 9, (4, 4000), np.uint8)})
    last, _ = fetch(model.store, tickets)
    assert (tmp_path / "changes").stat().st_size < 3 << 20  # 4.8 MB were written
    model.store.close()
    store = make(tmp_path, columns_of(None, shape=(4000,)), length=8, slack=8, resume=True)
    got, ok = fetch(store, store.newest()[1][4:, 0])
    assert ok.all()
    np.testing.assert_array_equal(got, last)


@pytest.mark.parametrize("verb", ["init", "resume"])
def test_opening_that_fails_at_any_call_leaves_the_folder_to_the_next(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            break
        assert number < 100
    assert number >= (5 if verb == "init" else 4)
    faults.left = -1
    if verb == "resume":
        assert fetch(store, ticket)[1].all()


def test_a_large_batch_comes_in_pieces_when_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = columns_of(None)
    store = make(tmp_path, columns, length=100, slack=0)
    rows = np.arange(600, dtype=np.uint32).view(np.uint8).reshape(600, 1, 4)[:, :, [0, 1, 2, 3, 0]]
    calls: list[int] = []
    real = Store._write
    monkeypatch.setattr(Store, "_write", lambda self, r, k: calls.append(len(r[0])) or real(self, r, k))
    first = store.write([rows[:110]], None)
    assert calls == [110]  # the file is longer than 100 rows: nothing is overwritten yet
    second = store.write([rows[110:300]], None)
    assert len(calls) > 2 and max(calls[1:]) <= 116 - 100 and second[-1, 0] == first[0, 0] + 299
    got, ok = fetch(store, second[-100:, 0])
    assert ok.all()
    np.testing.assert_array_equal(got, rows[200:300, 0])
    # A later piece that fails: the rows it would have overwritten are there, those of earlier pieces have expired.
    faults = Faults(monkeypatch)
    faults.left = 2 * 3  # rows, their checksums and the head, twice
    with pytest.raises(OSError, match="The first 32 of 90 rows were written before"):
        store.write([rows[300:390]], None)
    got, ok = fetch(store, second[-100:, 0])
    assert ok.tolist() == [False] * 32 + [True] * 68
    np.testing.assert_array_equal(got[32:], rows[232:300, 0])


def test_readers_never_see_other_rows(tmp_path: Path) -> None:
    """A reader holds tickets while the ring goes round, in files that are written before rows count."""
    columns = columns_of(None, Zstd(chunk=2), shape=(256,))
    store = make(tmp_path, columns, length=32, slack=8)
    done, wrong, seen = threading.Event(), list[Any](), [0, 0]
    newest = [store.write([row_numbers(0, 32)] * 2, None)]

    def read() -> None:
        while not done.is_set():
            tickets = newest[0][:, 0]
            out = [np.zeros((len(tickets), 256), np.uint8) for _ in columns]
            ok = store.read([(c, tickets, o) for c, o in enumerate(out)]).reshape(2, -1)
            for good, rows in zip(ok, out, strict=True):
                expected = np.where(good[:, None], row_numbers_of(tickets), 0)
                seen[0] += int(good.sum())
                seen[1] += int((~good).sum())
                if not (rows == expected).all():
                    wrong.append(tickets)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(400):
        newest[0] = store.write([row_numbers(32 + 12 * i, 12)] * 2, None)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong and seen[0] > 100


def row_numbers(first: int, count: int) -> np.ndarray:
    return row_numbers_of(np.arange(first + 1, first + count + 1, dtype=np.uint64))[:, None]


def row_numbers_of(tickets: np.ndarray) -> np.ndarray:
    """uint8[N, 256]: rows that say which they are, all over."""
    return np.repeat(tickets[:, None].astype("<u8").view(np.uint8).reshape(-1, 8), 32, 0).reshape(-1, 256)


# ------------------------------------------------------------------------------------------------ what is damaged


def test_damaged_chunks_are_found_and_the_rest_is_read(tmp_path: Path) -> None:
    columns, rows = columns_of(Zstd(chunk=4), shape=(24, 24)), frames(800)[:, None]
    settings = {"length": 800, "slack": 0}
    store = make(tmp_path, columns, **settings)
    tickets = store.write([rows], None)[:, 0]
    store.close()
    (path,) = sorted(tmp_path.glob("column0.segment-*"))
    clean = path.read_bytes()
    records = [i for i in range(len(clean)) if clean.startswith(b"fbc1", i)]
    assert len(records) >= 200
    rng = np.random.default_rng(0)
    for turn in range(12):
        at = int(rng.integers(0, records[-1])) if turn % 2 else records[17 * turn] + int(rng.integers(filearena.HEADER))
        text = bytearray(clean)
        text[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(text)
        store = make(tmp_path, columns, **settings, resume=True, verify=False)
        damaged = [records.index(max(r for r in records if r <= at))]
        for chunk in range(200):
            mine = tickets[4 * chunk : 4 * chunk + 4]
            if chunk in damaged:
                with pytest.raises(StoreCorrupted):
                    fetch(store, mine)
            else:
                got, ok = fetch(store, mine)
                assert ok.all()
                np.testing.assert_array_equal(got, rows[4 * chunk : 4 * chunk + 4, 0])
        store.write([rows[:40]], None)  # goes on
        store.close()
        for other in tmp_path.glob("column0.segment-*"):
            other.unlink()
        path.write_bytes(clean)
        restore_head(tmp_path, columns, settings, 800)


def restore_head(path: Path, columns: tuple[Column, ...], settings: dict[str, int], count: int) -> None:
    folder = Folder("Memmap", str(path), identity(columns, 1, **settings), resume=True)
    folder.save(folder.kinds, np.array([count], np.int64))
    folder.close()


@pytest.mark.parametrize("name", ["head", "column0.open", "changes", "dictionary", "manifest.json"])
def test_damage_that_concerns_many_rows_is_found_at_once(name: str, tmp_path: Path) -> None:
    columns = columns_of(Zstd(chunk=4), shape=(24, 24))
    store = make(tmp_path, columns, length=800)
    tickets = store.write([frames(802)[:, None]], None)
    store.patch(tickets[-2:, 0], np.ones(2, bool), {0: frames(2, seed=1)})
    store.close()
    if name == "dictionary":
        (name,) = {p.name for p in tmp_path.glob("column0.dictionary-*")}
    path = tmp_path / name
    text = bytearray(path.read_bytes())
    places: Any = range(0, len(text), max(len(text) // 50, 1))
    for at in {"column0.open": range(16), "head": [3, 4096 + 3]}.get(name, places):
        text[at] ^= 255
    path.write_bytes(text)
    with pytest.raises((StoreCorrupted, ValueError), match="damaged|bytes were"):
        make(tmp_path, columns, length=800, resume=True, verify=False)
    path.write_bytes(text[: len(text) // 3])
    with pytest.raises((StoreCorrupted, ValueError, OSError)):
        make(tmp_path, columns, length=800, resume=True, verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 2}, "has lanes 1; expected 2"),
        ({"length": 17}, "has length 16; expected 17"),
        ({"slack": 5}, "has slack 4; expected 5"),
        ({"columns": columns_of(Zstd(chunk=4))}, "leaf 'c0' of the store at .* has codec None; expected Zstd"),
        ({"columns": columns_of(None, shape=(6,))}, r"leaf 'c0' of the store at .* has shape \[5\]; expected \[6\]"),
        ({"columns": columns_of(None, dtype="int8")}, "has dtype uint8; expected int8"),
        ({"columns": columns_of(None, None)}, "has leaves c0; expected c0, c1"),
    ],
)
def test_another_store_is_refused_and_left_alone(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"columns": columns_of(None), "lanes": 1, "length": 16, "slack": 4}
    store = make(tmp_path, **settings)
    ticket = store.write([np.full((3, 1, 5), 7, np.uint8)], None)
    store.close()
    with pytest.raises(ValueError, match=f"Buffer.resume: .*{message}"):
        make(tmp_path, **(settings | change), resume=True)
    assert (fetch(make(tmp_path, **settings, resume=True), ticket)[0] == 7).all()


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    make(tmp_path, columns_of(None)).close()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 3}))
    with pytest.raises(ValueError, match="is of version 3; expected 2"):
        make(tmp_path, columns_of(None), resume=True)


# ------------------------------------------------------------------------------------------------ the folder


def test_a_folder_serves_one_store_at_a_time(tmp_path: Path) -> None:
    first = make(tmp_path, columns_of(None))
    for resume in (False, True):
        with pytest.raises(BlockingIOError, match="is in use by this process; expected nobody. Drop every state"):
            make(tmp_path, columns_of(None), resume=resume)
    first.close()
    with pytest.raises(FileExistsError, match=r"a store at .* already; expected none. .*buffer.resume\(example\)"):
        make(tmp_path, columns_of(None))
    second = make(tmp_path, columns_of(None), resume=True)
    del second  # let go of, not closed
    make(tmp_path, columns_of(None), resume=True)


def test_a_folder_with_other_files_is_refused_and_one_of_an_unfinished_store_is_not(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Buffer.resume: there is no store at"):
        make(tmp_path / "none", columns_of(None), resume=True)
    assert not (tmp_path / "none").exists()
    make(tmp_path / "half", columns_of(None)).close()
    (tmp_path / "half" / "manifest.json").unlink()
    make(tmp_path / "half", columns_of(None))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds other files \(.*\); expected none"):
        make(tmp_path, columns_of(None))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_temporary_folder_goes_with_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = make(None, columns_of(None))
    ticket = store.write([np.ones((3, 1, 5), np.uint8)], None)
    assert len(list(tmp_path.iterdir())) == 1
    out = np.zeros((3, 5), np.uint8)
    fetching = store._parts[0].fetch(
        np.zeros(3, np.int64), np.arange(3), np.ones(3, bool), store._count, np.zeros(1, np.int64)
    )
    del store
    assert list(tmp_path.iterdir()) == []
    fetching.run([memoryview(out.reshape(-1))])  # a read under way finishes
    assert (out == 1).all() and ticket.all()
    store = make(None, columns_of(None))
    store.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        faults = Faults(monkeypatch)
        faults.left = 2
        make(None, columns_of(None))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_files_are_sparse(tmp_path: Path) -> None:
    columns = columns_of(None, shape=(1000,))
    store = make(tmp_path, columns, length=10_000_000)
    assert store.disk < 64 * 1024
    store.write([np.ones((100, 1, 1000), np.uint8)], None)
    assert (tmp_path / "column0.rows").stat().st_size > 10**10
    assert store.disk < 300_000 and store.nbytes < 1000


def test_segments_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old chunks go, moved ones stay: also those of a lane that gets few rows."""
    monkeypatch.setattr(filearena, "_SMALL", 16_384)
    columns = columns_of(Zstd(chunk=2, dictionary=0), shape=(300,))
    model = Model(make(tmp_path, columns, lanes=2, length=60, slack=0), 60, 2)
    rng = np.random.default_rng(0)
    for i in range(150):
        rows = np.zeros((20, 2, 300), np.uint8)
        rows[..., :100] = rng.integers(0, 256, (20, 2, 100))
        keep = np.ones((20, 2), bool)
        keep[:, 1] = np.arange(20) == 0 if i % 10 == 0 else False
        model.write([rows], keep)
        model.rows = {t: model.rows[t] for t in model.live()}
        model.check(rng)
    arena = model.store._parts[0].arena
    assert len(arena.segments) < 8 and len(list(tmp_path.glob("*.segment-*"))) == len(arena.segments)
    assert arena.live < arena.capacity < 8 * 16_384
    resumed(model, tmp_path)
    model.check(rng)
    number = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        model.write([rng.integers(0, 2, (20, 2, 300)).astype(np.uint8)], None)
        model.rows = {t: model.rows[t] for t in model.live()}
    assert len(os.listdir("/proc/self/fd")) < number + 10


# ------------------------------------------------------------------------------------------------ other processes

WRITER = """
import sys, numpy as np
from tests.disk import killable, numbered
store = killable(sys.argv[1], resume=sys.argv[2] == "resume")
rng = np.random.default_rng(int(sys.argv[3]))
print("ready", flush=True)
while True:
    n = int(rng.integers(1, 30))
    keep = None if rng.random() < 0.5 else rng.random((n, 3)) < rng.random((1, 3))
    before = store._count
    kept = np.ones((n, 3), bool) if keep is None else keep
    count = before + np.cumsum(kept, axis=0) - 1
    store.write([numbered(count, c.shape) for c in store.columns], keep)
    print(*store._count.tolist(), flush=True)
"""


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent)])}


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_loses_no_row_it_had_written(rounds: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(rounds)
    path = tmp_path / "store"
    total = 0
    for turn in range(rounds):
        args = [sys.executable, "-c", WRITER, str(path), "init" if turn == 0 else "resume", str(turn)]
        process = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment())
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        timer = threading.Timer(float(rng.uniform(0.02, 0.5)), process.send_signal, [signal.SIGKILL])
        timer.start()
        said = [line for line in process.stdout if line.endswith("\n")]
        process.wait()
        process.stdout.close()
        timer.join()
        store = killable(str(path), resume=True)
        count, tickets = store.newest()
        total = int(count.sum())
        if said:
            assert (count >= np.array(said[-1].split(), np.int64)).all()
        position = np.arange(200)[:, None]
        number = position + (count - 1 - position) // 200 * 200
        assert ((tickets > 0) == (number >= 0)).all()
        for c, column in enumerate(store.columns):
            got, ok = fetch(store, tickets, c)
            assert ok.all()
            expected = numbered(number, column.shape)
            mask = (tickets > 0).reshape(tickets.shape + (1,) * len(column.shape))
            np.testing.assert_array_equal(got, np.where(mask, expected, 0))
        store.close()
    assert total > 1000


FULL = """
import sys, resource, signal, numpy as np
from fbuf._host.codec import Zstd
from tests.disk import columns_of, make, fetch
path, kind = sys.argv[1:3]
columns = columns_of(None if kind == "raw" else Zstd(chunk=2), shape=(5000,))
store = make(path + "/store", columns, length=4000, slack=0)
other = make(path + "/other", columns_of(None, shape=(5000,)), lanes=2, length=4000, slack=0)
other.write([np.ones((1, 2, 5000), np.uint8)], np.array([[False, True]]))
rng = np.random.default_rng(0)
kept, errors = [], 0
for i in range(400):
    rows = np.zeros((7, 1, 5000), np.uint8)
    rows[..., :3000] = rng.integers(0, 256, (7, 1, 3000))
    try:
        kept.append((store.write([rows], None), rows))
    except OSError as error:
        errors += 1
        assert "cannot write" in str(error) or "cannot give" in str(error), error
        if errors > 20:
            break
assert errors > 20 and kept, (errors, len(kept))
assert fetch(other, [9, 2])[1].tolist() == [False, True]  # a look at the hole before that row would need room
for tickets, rows in kept:
    got, ok = fetch(store, tickets)
    assert ok.all() and (got == rows).all()
store.close()
store = make(path + "/store", columns, length=4000, slack=0, resume=True)
for tickets, rows in kept:
    got, ok = fetch(store, tickets)
    assert ok.all() and (got == rows).all()
assert int(store.newest()[0][0]) == 7 * len(kept)
print(len(kept), errors)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system here: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_a_full_disk_is_an_error_and_no_signal(kind: str, small_disk: Path) -> None:
    args = [sys.executable, "-c", FULL, str(small_disk), kind]
    done = subprocess.run(args, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) * 7 * 3000 > 2_000_000


LIMITED = """
import resource, sys
from tests.disk import columns_of, make
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    make(sys.argv[1] + "/store", columns_of(None, shape=(5000,)), length=4000)
except OSError as error:
    print(error)
"""


def test_a_limit_on_the_size_of_files_is_an_error_with_words(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] in (-1, resource.RLIM_INFINITY)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=environment(), check=True
    )
    assert "File too large" in done.stdout and "Raise the limit on the size of files (ulimit -f)" in done.stdout


LOCKER = """
import sys
from tests.disk import columns_of, make
try:
    make(sys.argv[1], columns_of(None), resume=True)
except BlockingIOError as error:
    print(error)
"""


def test_another_process_cannot_have_it_too(tmp_path: Path) -> None:
    store = make(tmp_path, columns_of(None))
    args = [sys.executable, "-c", LOCKER, str(tmp_path)]
    done = subprocess.run(args, capture_output=True, text=True, env=environment(), check=True)
    assert f"in use by process {os.getpid()}; expected nobody" in done.stdout
    store.close()
    assert subprocess.run(args, capture_output=True, text=True, env=environment(), check=True).stdout == ""


@pytest.mark.parametrize("end", ["pass", "raise KeyError('x')"])
def test_a_temporary_folder_is_gone_after_the_process(end: str, tmp_path: Path) -> None:
    code = f"from tests.disk import columns_of, make\nstore = make(None, columns_of(None))\n{end}"
    args = [sys.executable, "-c", code]
    done = subprocess.run(args, capture_output=True, env=environment() | {"TMPDIR": str(tmp_path)})
    assert done.returncode == (end != "pass")
    assert list(tmp_path.iterdir()) == []


def test_a_fork_does_not_remove_what_it_does_not_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os, sys\nfrom tests.disk import columns_of, make\nstore = make(None, columns_of(None))\n"
        "if os.fork() == 0: sys.exit()\nos.wait()\nprint(os.path.exists(store._folder.path))"
    )
    args = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(args, capture_output=True, text=True, env=environment() | {"TMPDIR": str(tmp_path)})
    assert done.stdout == "True\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rows_of_no_bytes_are_there_again(tmp_path: Path) -> None:
    columns = (Column("nothing", (0,), np.dtype(bool), None), Column("t", (), np.dtype(np.int64), None))
    store = make(tmp_path / "a", columns)
    store.write([np.zeros((3, 1, 0), bool), np.arange(3).reshape(3, 1)], None)
    store.close()
    again = make(tmp_path / "a", columns, resume=True)
    arrays = again.to_arrays()
    assert arrays["column0:rows"].shape == (3, 1, 0)
    again.close()
    make(tmp_path / "b", columns, arrays=arrays).close()
