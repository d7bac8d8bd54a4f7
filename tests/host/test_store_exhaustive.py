"""Host stores used for long, after more kills, power failures and damage, and writes that fail at each call."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from fbuf._host.codecs import Zstd
from fbuf._host.memory import file_arena
from fbuf._host.store import row_updates
from tests.support import power
from tests.support.disk_faults import check_failing_writes
from tests.support.recovery import KINDS, check_damages, check_killed, check_power_failed
from tests.support.replay import resident
from tests.support.store import fetch, frames, make
from tests.support.tables import checks

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")]


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
            store.patch(pick[:1], np.ones(1, bool), {0: rows[0, :1]})
            done += 1
        if done >= 100_000 and not before:
            before = resident()
    if store._thread is not None:
        store._thread.join(60)
    assert resident() - before < 3  # MiB
    assert store.nbytes < 4 << 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_process_loses_no_row(kind, seed, tmp_path):
    check_killed(kind, tmp_path / "store", 20, seed)


@pytest.mark.parametrize("kind", power.KINDS)
@pytest.mark.parametrize("first", range(1000, 1500, 10))
def test_flushed_rows_survive_a_power_failure_after_any_call(kind, first, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    monkeypatch.setattr(row_updates, "_LEAST", 512)
    for seed in range(first, first + 10):
        (tmp_path / str(seed)).mkdir()
        power.check_prefixes(kind, seed, tmp_path / str(seed), 60, prefixes=8, again=0.02)


@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("first", range(8, 200, 16))
def test_flushed_rows_survive_a_power_failure(kind, first, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 8192)
    for seed in range(first, first + 16):
        check_power_failed(kind, seed, tmp_path / str(seed))


@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("verify", [True, False], ids=["full", "lazy"])
def test_truncated_and_flipped_files_show_no_wrong_row(kind, verify, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    check_damages(kind, verify, True, tmp_path)


FAILING = itertools.product(["noise", "still"], range(5), [40])
test_a_failed_write_leaves_the_store_unchanged = checks((check_failing_writes, FAILING))
