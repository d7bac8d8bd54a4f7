"""Rows in files after the worst: processes killed at any instant, power that failed, damaged, missing, mixed and foreign files.

Rows say which they are (`numbered`), so one rule serves throughout: whatever happened to the files, a store that
opens serves each row that it counts as it was written, or says which are gone; never another one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host import filearena
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.codec import Zstd
from fbuf._host.store import Column, Store
from fbuf._host.sums import Sums
from fbuf._host.whole import longest
from fbuf.storages import Compressed, Memmap
from tests.support.disk import environment, make, numbered
from tests.support.store import columns_of, fetch

ERRORS = (StoreCorrupted, ValueError, OSError)
KINDS: dict[str, tuple[Column, ...]] = {
    "memmap": (*columns_of(None, shape=(96,)), Column("small", (), np.dtype("int64"), None)),
    "files": (*columns_of(Zstd(chunk=4), shape=(96,)), Column("small", (), np.dtype("int64"), None)),
}
KIND = pytest.mark.parametrize("kind", KINDS)
SETTINGS = {"lanes": 3, "length": 60, "slack": 10}


def opened(kind: str, path: Any, **settings: Any) -> Store:
    return make(path, KINDS[kind], **(SETTINGS | settings))


def write(store: Store, rng: np.random.Generator, most: int = 30) -> None:
    n, lanes = int(rng.integers(1, most)), store.lanes
    keep = None if rng.random() < 0.5 else rng.random((n, lanes)) < rng.random((1, lanes))
    count = store._count + np.cumsum(np.ones((n, lanes), bool) if keep is None else keep, axis=0) - 1
    store.write([numbered(count, c.shape) for c in store.columns], keep)


def check(store: Store) -> int:
    """Reads every row that states would name, and says how many there are; a row that is another is an error of the test."""
    count, tickets = store.newest()
    position = np.arange(store.length)[:, None]
    number = position + (count - 1 - position) // store.length * store.length
    there = tickets > 0
    assert not (there & (number < 0)).any()
    for c, column in enumerate(store.columns):
        got, ok = fetch(store, tickets, c)
        assert ok.all()
        mask = there.reshape(there.shape + (1,) * len(column.shape))
        np.testing.assert_array_equal(got, np.where(mask, numbered(number, column.shape), 0))
    return int(there.sum())


def survives(kind: str, path: Any, rows: int, **settings: Any) -> str:
    """Opens a store something happened to: what was said. If nothing is said, every row must be there."""
    try:
        store = opened(kind, path, resume=True, **settings)
    except ERRORS as error:
        return type(error).__name__
    try:
        try:
            found = check(store)
        except StoreCorrupted:  # a row that is looked at when it is read
            assert settings.get("verify") is False
            return "StoreCorrupted"
        assert store.warning or found == rows
        return "a warning" if store.warning else ""
    finally:
        store.close()


# ------------------------------------------------------------------------------------------------------- killed

KILLER = """
import mmap, os, signal, sys, time
import numpy as np
from fbuf._host import filearena
from tests.test_recovery import check, opened, write

filearena._SMALL = 16_384
kind, path, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
shared = mmap.mmap(-1, 24)
said = np.frombuffer(shared, np.int64)
rng = np.random.default_rng(rounds)
for turn in range(rounds):
    before = said.copy()
    child = os.fork()
    if child == 0:
        store = opened(kind, path, resume=turn > 0)
        mine = np.random.default_rng(turn)
        while True:
            write(store, mine)
            said[:] = store._count
    while turn == 0 and not said.any():
        time.sleep(0.001)
    time.sleep(float(rng.exponential(0.03)))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    store = opened(kind, path, resume=True)
    assert not store.warning, store.warning
    assert (store._count >= said).all(), (store._count, said)
    check(store)
    store.close()
print(int(said.sum()))
"""


@KIND
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_processes_killed_at_any_instant_lose_no_row(kind: str, rounds: int, tmp_path: Path) -> None:
    """Each goes on where the last was killed: on opening, while writing, while giving segments back."""
    args = [sys.executable, "-W", "ignore", "-c", KILLER, kind, str(tmp_path / "store"), str(rounds)]
    done = subprocess.run(args, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2 * rounds


# ------------------------------------------------------------------------------------------- the power that failed

SECTOR = 512


def after_power_failed(moments: list[Path], target: Path, rng: np.random.Generator) -> None:
    """Of each sector of each file what it was at one of the moments; files made or removed since may be there or not."""
    target.mkdir()
    names = {p.name for moment in moments for p in moment.iterdir()}
    for name in names:
        versions = [(m / name).read_bytes() if (m / name).exists() else None for m in moments]
        known = [v for v in versions if v is not None]
        if versions[0] is None or versions[-1] is None:
            if rng.random() < 0.3:
                continue
        size = len(known[rng.integers(len(known))])
        whole = rng.random() < 0.3
        pick = (
            np.full(size // SECTOR + 1, rng.integers(len(known)))
            if whole
            else rng.integers(0, len(known), size // SECTOR + 1)
        )
        text = bytearray(size)
        for sector, which in enumerate(pick.tolist()):
            at = sector * SECTOR
            piece = known[which][at : min(at + SECTOR, size)]
            text[at : at + len(piece)] = piece
        (target / name).write_bytes(text)


@KIND
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 200))])
def test_after_a_failure_of_power_what_was_flushed_is_there(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filearena, "_SMALL", 8192)
    rng = np.random.default_rng(seed)
    few = seed % 2 == 0  # written since: no more than the spare places and the slack hold
    store = opened(kind, tmp_path / "0")
    for _ in range(int(rng.integers(1, 20))):
        write(store, rng)
    store.flush()
    flushed = store._count.copy()
    moments = []
    for number in range(4):
        moments.append(tmp_path / f"moment{number}")
        shutil.copytree(tmp_path / "0", moments[-1])
        for _ in range(1 if few else 8):
            write(store, rng, 8 if few else 30)
    store.close()
    after_power_failed(moments, tmp_path / "1", rng)
    try:
        store = opened(kind, tmp_path / "1", resume=True)
    except ERRORS:
        assert not few
        return
    found = check(store)
    if few:
        assert (store._count >= flushed - 3).all(), (store._count, flushed)  # chunks of 4
        assert found >= (min(int(flushed.min()), 60 - 12) - 3) * 3
    for _ in range(6):  # goes on, and no row of the time before comes back
        write(store, rng)
    check(store)
    store.close()
    store = opened(kind, tmp_path / "1", resume=True)
    assert not store.warning
    check(store)
    store.close()


def test_flush_waits_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened("files", tmp_path / "0")
    write(store, np.random.default_rng(0))
    waited, real = list[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: waited.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    store.flush()
    there = {str(p) for p in (tmp_path / "0").iterdir()}
    assert set(waited) == there | {str(tmp_path / "0")} and waited[-1] == str(tmp_path / "0")

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match=r"cannot flush .*Input/output error.*See to the disk under"):
        store.flush()
    monkeypatch.undo()
    check(store)


@pytest.mark.parametrize(("sync", "times"), [(None, 0), (0, 3), (1000.0, 0)])
def test_writes_wait_for_the_disk_as_often_as_asked(
    sync: float | None, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = fbuf.Buffer(20, storage=Memmap(str(tmp_path), sync=sync))
    state = buffer.init({"t": 0})
    calls, real = list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(fd) or real(fd))
    for i in range(3):
        state = jax.block_until_ready(buffer.extend(state, {"t": jnp.arange(i, i + 2)}))
    files = len(list(tmp_path.iterdir())) + 1
    assert len(calls) == times * files
    buffer.flush(state)
    assert len(calls) == (times + 1) * files


def test_what_flush_and_sync_take(tmp_path: Path) -> None:
    for buffer in (
        fbuf.uniform(8),
        fbuf.Buffer(8, storage=fbuf.storages.Host()),
        fbuf.Buffer(8, storage=fbuf.storages.Ragged()),
    ):
        buffer.flush(buffer.init({"t": 0}))
    for sync in (-1, float("inf"), float("nan"), "60", True):
        with pytest.raises(ValueError, match=r"sync is .*; expected seconds >= 0 .*Write sync=60"):
            Memmap(sync=sync)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Compressed: sync is -1"):
        Compressed(path=str(tmp_path), sync=-1)


# ---------------------------------------------------------------------------------------------- files that are others

SMALL = {"lanes": 3, "length": 9, "slack": 2}


def small(kind: str, path: Path, writes: int, seed: int = 0) -> None:
    """A store with changed rows among its own (of the value they had, so that `check` serves)."""
    make(path, KINDS[kind], **SMALL).close() if not (path / "manifest.json").exists() else None
    store = make(path, KINDS[kind], **SMALL, resume=True)
    rng = np.random.default_rng(seed)
    for _ in range(writes):
        write(store, rng, 9)
    count, tickets = store.newest()
    store.patch(tickets[:1, 0], np.ones(1, bool), {1: fetch(store, tickets[:1, 0], 1)[0]})
    store.close()


def rows_there(kind: str, path: Path) -> int:
    store = make(path, KINDS[kind], **SMALL, resume=True)
    try:
        return check(store)
    finally:
        store.close()


def damages(path: Path, exhaustive: bool, rng: np.random.Generator) -> list[tuple[str, Callable[[bytes], bytes]]]:
    """Of each file: cut at every length, and a bit flipped in every byte, every bit of short ones; or a choice of these."""
    made: list[tuple[str, Callable[[bytes], bytes]]] = []
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        if file.name == "lock" or not size:
            continue
        used = size if file.name != "head" else 4096 + 200
        cuts = range(size) if exhaustive else rng.integers(0, size, 12).tolist()
        every = range(8 * used) if used < 512 else (8 * np.arange(used) + rng.integers(0, 8, used)).tolist()
        bits = every if exhaustive else rng.integers(0, 8 * used, 25).tolist()
        made += [(file.name, lambda text, n=n: text[:n]) for n in cuts]
        made += [(file.name, lambda text, b=b: flipped(text, b)) for b in bits]
    return made


def flipped(text: bytes, bit: int) -> bytes:
    changed = bytearray(text)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@KIND
@pytest.mark.parametrize("verify", [True, False], ids=["full", "lazy"])
@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_cut_and_no_flipped_bit_shows_another_row(
    kind: str, verify: bool, exhaustive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filearena, "_SMALL", 1024)
    small(kind, tmp_path / "0", 6)
    rows = rows_there(kind, tmp_path / "0")
    said: dict[str, int] = {}
    for number, (name, damage) in enumerate(damages(tmp_path / "0", exhaustive, np.random.default_rng(0))):
        path = tmp_path / f"{number + 1}"
        shutil.copytree(tmp_path / "0", path)
        (path / name).write_bytes(damage((path / name).read_bytes()))
        what = survives(kind, path, rows, **SMALL, verify=verify)
        said[what] = said.get(what, 0) + 1
        shutil.rmtree(path)
    assert said["StoreCorrupted"] and (not verify or said["a warning"])


@KIND
def test_files_of_two_moments_never_make_a_third(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice of files from an older and a newer copy of one folder."""
    monkeypatch.setattr(filearena, "_SMALL", 1024)
    path = tmp_path / "0"
    small(kind, path, 3)
    shutil.copytree(path, tmp_path / "old")
    small(kind, path, 2, seed=1)
    shutil.copytree(path, tmp_path / "new")
    rows = rows_there(kind, path)
    names = sorted({p.name for m in ("old", "new") for p in (tmp_path / m).iterdir()} - {"lock", "manifest.json"})
    said: dict[str, int] = {}
    rng = np.random.default_rng(0)
    for choice in range(2 ** len(names)) if len(names) < 6 else rng.integers(0, 2 ** len(names), 60).tolist():
        mixed = tmp_path / "mixed"
        shutil.copytree(tmp_path / "new", mixed)
        for i, name in enumerate(names):
            if choice >> i & 1:
                (mixed / name).unlink(missing_ok=True)
                if (tmp_path / "old" / name).exists():
                    shutil.copy(tmp_path / "old" / name, mixed / name)
        whole = choice in (0, 2 ** len(names) - 1)
        verify = bool(rng.integers(2))
        what = survives(
            kind, mixed, rows if not whole or not choice else rows_there(kind, tmp_path / "old"), **SMALL, verify=verify
        )
        assert not whole or what == ""
        said[what] = said.get(what, 0) + 1
        shutil.rmtree(mixed)
    assert said.get("StoreCorrupted", 0) + said.get("a warning", 0) > 10


@KIND
def test_files_of_another_store_and_missing_ones_are_noticed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filearena, "_SMALL", 1024)
    for seed, name in enumerate(("mine", "other")):
        small(kind, tmp_path / name, 4, seed)
    rows = rows_there(kind, tmp_path / "mine")
    for file in sorted(p.name for p in (tmp_path / "mine").iterdir() if p.name != "lock"):
        for foreign in (True, False):
            path = tmp_path / "mixed"
            shutil.copytree(tmp_path / "mine", path)
            (path / file).unlink()
            if foreign and (tmp_path / "other" / file).exists():
                shutil.copy(tmp_path / "other" / file, path / file)
            said = survives(kind, path, rows, **SMALL)
            assert said, f"{file} {'of another store' if foreign else 'missing'} went unnoticed"
            if not foreign and file == "column1.sums":
                with pytest.raises(StoreCorrupted, match="column1.sums is missing; expected every file of the store"):
                    make(path, KINDS[kind], **SMALL, resume=True)
            shutil.rmtree(path)


# ------------------------------------------------------------------------------------------------ which rows go on


@given(data=st.data())
def test_the_longest_run_is_the_longest(data: st.DataObject) -> None:
    lanes, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    count = np.array(data.draw(st.lists(st.integers(0, 30), min_size=lanes, max_size=lanes)))
    low = np.maximum(count - data.draw(st.integers(length, 12)), 0)
    bad = [(e, r) for e in range(lanes) for r in range(int(low[e]), int(count[e])) if data.draw(st.integers(0, 9)) == 0]
    pairs = np.array(bad, np.int64).reshape(-1, 2)
    chunks = data.draw(st.lists(st.integers(1, 4), max_size=2))
    stop, held = longest(low, count, length, [(pairs[::2, 0], pairs[::2, 1]), (pairs[1::2, 0], pairs[1::2, 1])], chunks)
    for e in range(lanes):
        mine = {r for lane, r in bad if lane == e}
        if not mine:
            assert (stop[e], held[e]) == (count[e], min(count[e] - low[e], length))
            continue
        kept = range(int(stop[e] - held[e]), int(stop[e]))
        assert not mine & set(kept) and 0 <= held[e] <= length and stop[e] <= count[e]
        assert held[e] in (0, length) or stop[e] == held[e] or (stop[e] - held[e]) % length
        assert all(stop[e] >= count[e] // k * k or stop[e] % k == 0 for k in chunks)
        runs = [len(run) for run in "".join(".x"[r in mine] for r in range(int(low[e]), int(count[e]))).split("x")]
        assert held[e] >= min(max(runs), length) - (max(chunks, default=1) - 1) * max(chunks, default=1) - 1


@given(data=st.data())
def test_a_checksum_is_of_the_row_its_place_and_its_store(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 28, 29, 400]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, seed = rng.integers(0, 256, (5, row), np.uint8), int(rng.integers(2**63))
    lane, count = rng.integers(0, 4, 5), rng.integers(0, 10**12, 5)
    sums = Sums(seed, row)
    first = sums.of(rows, sums.names(lane, count))
    one_by_one = [sums.of(rows[i : i + 1], sums.names(lane[i : i + 1], count[i : i + 1])) for i in range(5)]
    np.testing.assert_array_equal(first, np.concatenate(one_by_one))
    for at in {0, row - 1, int(rng.integers(row))}:
        for bit in range(8):
            other = rows.copy()
            other[:, at] ^= 1 << bit
            assert (sums.of(other, sums.names(lane, count)) != first).all()
    assert (sums.of(rows, sums.names(lane, count + 1)) != first).all()
    assert (sums.of(rows, sums.names(lane + 1, count)) != first).all()
    foreign = Sums(seed ^ 1, row)
    assert (foreign.of(rows, foreign.names(lane, count)) != first).all()
    assert (first != 0).all()  # what a hole of the file says


# ------------------------------------------------------------------------------------------------ through JAX


def rows_of(first: int, count: int) -> dict[str, Any]:
    t = np.arange(first, first + count, dtype=np.int32)
    return {"t": t, "obs": np.repeat((t % 251).astype(np.uint8)[:, None], 1024, 1)}


EXAMPLE = {"t": np.int32(0), "obs": np.zeros(1024, np.uint8)}
STORAGES = {"memmap": Memmap, "files": lambda path, **kw: Compressed(path=path, codec=Zstd(chunk=4), **kw)}


def damage(path: Path, first: int, count: int) -> None:
    """Flips a byte of the rows in the files of a buffer's store."""
    with open(path / "column1.rows", "r+b") as file:
        for row in range(first, first + count):
            file.seek(row * 4)
            byte = file.read(1)
            file.seek(row * 4)
            file.write(bytes([byte[0] ^ 64]))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_goes_on_with_the_rows_that_are_whole(storage: str, tmp_path: Path) -> None:
    """And says so once; the next time there is nothing to say."""
    buffer = fbuf.Buffer(100, storage=STORAGES[storage](str(tmp_path)), sampler=fbuf.samplers.Prioritized())
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 60))
    jax.block_until_ready(state)
    del state
    damage(tmp_path, 50, 2)
    last = 50 if storage == "memmap" else 48  # between two chunks
    with pytest.warns(RuntimeWarning, match=rf"Buffer.resume: {60 - last} rows and 0 changes .*fbuf.load\(path\)"):
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[:last].tolist() == list(range(last))
    assert int(buffer.size(state)) == last
    state = buffer.extend(state, rows_of(last, 30))
    state, batch = buffer.sample(state, jax.random.key(0), 64)
    assert batch.mask.all() and (batch.data["obs"][:, 0] == batch.data["t"] % 251).all()
    del state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[: last + 30].tolist() == list(range(last + 30))


def test_the_older_rows_go_where_those_after_the_damage_are_more(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(40, storage=Memmap(str(tmp_path)), view=fbuf.views.Sequence(3, episode_end=()))
    state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30)))
    del state
    damage(tmp_path, 9, 1)
    with pytest.warns(RuntimeWarning, match="10 rows and 0 changes"):
        state = buffer.resume(EXAMPLE)
    for _ in range(2):
        held = buffer.rows(state)
        assert np.asarray(held.data["t"])[np.asarray(held.mask)].tolist() == list(range(10, 30))
        batch = buffer.peek(state, jax.random.key(1), 64)
        assert int(batch.data["t"].min()) >= 10
        state = None  # lets go of the folder
        state = buffer.resume(EXAMPLE, verify="lazy")  # which rows are there is known


def test_lazily_each_row_is_looked_at_when_it_is_read(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(100, storage=Memmap(str(tmp_path)))
    state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 60)))
    del state
    damage(tmp_path, 50, 1)
    state = buffer.resume(EXAMPLE, verify="lazy")
    assert np.asarray(buffer.get(state, jnp.arange(50)).data["t"]).tolist() == list(range(50))
    with pytest.raises(Exception, match="1 rows have other checksums than they were stored with"):
        jax.block_until_ready(buffer.get(state, jnp.arange(48, 52)))
    state = buffer.extend(state, rows_of(60, 41))
    assert int(buffer.last(state, 1).data["t"][0]) == 100
    assert np.asarray(buffer.get(state, jnp.arange(60, 100)).data["t"]).tolist() == list(range(60, 100))
    with pytest.raises(ValueError, match='verify is "some"|verify is \'some\'; expected "full" or "lazy"'):
        buffer.resume(EXAMPLE, verify="some")


def test_changes_that_are_lost_are_told(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=Memmap(str(tmp_path)))
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 10))
    for row in (3, 4):
        index = jax.tree.map(lambda x: x[row : row + 1], buffer.rows(state).index)  # noqa: B023
        state = jax.block_until_ready(buffer.update_rows(state, index, {"t": jnp.array([-row], jnp.int32)}))
    del state
    text = (tmp_path / "changes").read_bytes()
    (tmp_path / "changes").write_bytes(text[: len(text) * 2 // 3])
    with pytest.raises(StoreCorrupted, match='the last 1 changed rows.*go on without these.*verify="full"'):
        buffer.resume(EXAMPLE, verify="lazy")
    with pytest.warns(RuntimeWarning, match="0 rows and 1 changes of rows"):
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[:6].tolist() == [0, 1, 2, -3, 4, 5]
    del state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = buffer.resume(EXAMPLE)
    assert np.asarray(buffer.rows(state).data["t"])[:6].tolist() == [0, 1, 2, -3, 4, 5]


def test_nothing_whole_is_an_error_and_leaves_the_files_alone(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=Memmap(str(tmp_path)))
    state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5)))
    del state
    damage(tmp_path, 0, 5)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock"}
    with pytest.raises(StoreCorrupted, match=r"none of the rows at .* is what was written; .*fbuf.load\(path\)"):
        buffer.resume(EXAMPLE)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "lock"} == before
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest["id"]) == 16 and manifest["version"] == 2
