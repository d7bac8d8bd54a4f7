"""Stores in files that something happened to: processes killed, power that failed, bytes cut off or flipped."""

import shutil

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.store.store import Column
from fbuf._host.types import StoreCorrupted
from tests.support.disk import flipped, make, numbered
from tests.support.processes import run_python
from tests.support.store import Deflate, columns_of, fetch

ERRORS = (StoreCorrupted, ValueError, OSError)
KINDS = {
    "memmap": (*columns_of(None, shape=(96,)), Column("small", (), np.dtype("int64"), None)),
    "files": (*columns_of(Zstd(chunk=4), shape=(96,)), Column("small", (), np.dtype("int64"), None)),
    "own": columns_of(None, Deflate(chunk=3), shape=(96,)),
}
SETTINGS = {"lanes": 3, "length": 60, "slack": 10}


def opened(kind, path, **settings):
    return make(path, KINDS[kind], **(SETTINGS | settings))


def write(store, rng, most=30):
    n, lanes = int(rng.integers(1, most)), store.lanes
    keep = None if rng.random() < 0.5 else rng.random((n, lanes)) < rng.random((1, lanes))
    count = store._count + np.cumsum(np.ones((n, lanes), bool) if keep is None else keep, axis=0) - 1
    store.write([numbered(count, c.shape) for c in store.columns], keep)


def check(store):
    """Read every row that states would name; return how many there are. None may be another."""
    count, tickets, _ = store.newest()
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


def survives(kind, path, rows, **settings):
    """Open a store something happened to; return what was said. If nothing is said, every row must be there."""
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


KILLER = """
import mmap, os, signal, sys, time
import numpy as np
from fbuf._host.memory import file_arena
from tests.support.recovery import check, opened, write

file_arena.FileArena.small = 16_384
kind, path, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
said = np.frombuffer(mmap.mmap(-1, 24), np.int64)
rng = np.random.default_rng(seed)
for turn in range(rounds):
    child = os.fork()
    if child == 0:
        store = opened(kind, path, resume=turn > 0)
        mine = np.random.default_rng(turn)
        while True:
            write(store, mine)
            said[:] = store._count
    while turn == 0 and not said.any():
        time.sleep(0.001)
    delay = float(rng.exponential(0.03))
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print(f"{kind}, seed {seed}, turn {turn}: killed after {delay:.4f} s", flush=True)
    store = opened(kind, path, resume=True)
    assert not store.warning, store.warning
    assert (store._count >= said).all(), (store._count, said)
    assert check(store) == np.minimum(store._count, store.length).sum()
    store.close()
assert said.sum() > 2 * rounds
"""


def check_killed(kind, path, rounds, seed=0):
    run_python(KILLER, kind, path, rounds, seed, options=("-W", "ignore"))


SECTOR = 512


def after_power_failed(moments, target, rng):
    """Make each sector of each file what it was at one of the moments; files made or removed since may be there or not."""
    target.mkdir()
    for name in sorted({p.name for moment in moments for p in moment.iterdir()}):
        versions = [(m / name).read_bytes() if (m / name).exists() else None for m in moments]
        known = [v for v in versions if v is not None]
        if versions[0] is None or versions[-1] is None:
            if rng.random() < 0.3:
                continue
        size = len(known[rng.integers(len(known))])
        whole = rng.random() < 0.3
        pick = rng.integers(0, len(known), 1 if whole else size // SECTOR + 1)
        text = bytearray(size)
        for sector in range(size // SECTOR + 1):
            at = sector * SECTOR
            piece = known[pick[sector % len(pick)]][at : min(at + SECTOR, size)]
            text[at : at + len(piece)] = piece
        (target / name).write_bytes(text)


def check_power_failed(kind, seed, path):
    """What was flushed is there after the power failed, unless it was written over since."""
    rng = np.random.default_rng(seed)
    few = seed % 2 == 0  # written since: no more than the spare places and the slack hold
    store = opened(kind, path / "0")
    for _ in range(int(rng.integers(1, 20))):
        write(store, rng)
    store.flush()
    flushed = store._count.copy()
    moments = []
    for number in range(4):
        moments.append(path / f"moment{number}")
        shutil.copytree(path / "0", moments[-1])
        for _ in range(1 if few else 8):
            write(store, rng, 8 if few else 30)
    store.close()
    after_power_failed(moments, path / "1", rng)
    try:
        store = opened(kind, path / "1", resume=True)
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
    store = opened(kind, path / "1", resume=True)
    assert not store.warning
    check(store)
    store.close()


SMALL = {"lanes": 3, "length": 9, "slack": 2}


def small(kind, path, writes, seed=0):
    """Write to a store, and change rows (to the value they had, so that `check` serves)."""
    store = opened(kind, path, **SMALL, resume=(path / "manifest.json").exists())
    rng = np.random.default_rng(seed)
    for _ in range(writes):
        write(store, rng, 9)
    count, tickets, _ = store.newest()
    store.update_rows(tickets[:1, 0], np.ones(1, bool), {1: fetch(store, tickets[:1, 0], 1)[0]})
    store.close()


def rows_there(kind, path):
    store = opened(kind, path, **SMALL, resume=True)
    try:
        return check(store)
    finally:
        store.close()


def damages(path, exhaustive, rng):
    """Yield cuts of each file at every length and flips of a bit in every byte (all bits of short files), or some of these."""
    for file in sorted(path.iterdir()):
        text = file.read_bytes()
        if file.name == "lock" or not text:
            continue
        used = len(text) if file.name != "head" else 4096 + 200
        every = range(8 * used) if used < 512 else (8 * np.arange(used) + rng.integers(0, 8, used)).tolist()
        for at in range(len(text)) if exhaustive else rng.integers(0, len(text), 12).tolist():
            yield file.name, text[:at]
        for bit in every if exhaustive else rng.integers(0, 8 * used, 25).tolist():
            yield file.name, flipped(text, bit)


def check_damages(kind, verify, exhaustive, path):
    small(kind, path / "0", 6)
    rows, said = rows_there(kind, path / "0"), set()
    for number, (name, text) in enumerate(damages(path / "0", exhaustive, np.random.default_rng(0))):
        copy = path / f"{number + 1}"
        shutil.copytree(path / "0", copy)
        (copy / name).write_bytes(text)
        said.add(survives(kind, copy, rows, **SMALL, verify=verify))
        shutil.rmtree(copy)
    assert said >= ({"StoreCorrupted", "a warning"} if verify else {"StoreCorrupted"})
