"""Test stores in files after kills, power failures, and damaged, missing or mixed files."""

import errno
import itertools
import os
import shutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.columns.raw_file import RowChecksums
from fbuf._host.memory import file_arena
from fbuf._host.store.factory import longest_valid_run
from fbuf._host.types import StoreCorrupted
from tests.support import recovery as support
from tests.support.tables import by_tier

KIND = pytest.mark.parametrize("kind", ["memmap", "files"])


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)


@pytest.mark.more
def test_a_killed_process_loses_no_row(tmp_path):
    support.check_killed("files", tmp_path / "store", 12)


@pytest.mark.parametrize("kind", by_tier("memmap", more=["files"]))
def test_flushed_rows_survive_a_power_failure(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 8192)
    for seed in range(8):
        support.check_power_failed(kind, seed, tmp_path / str(seed))


def test_flush_waits_for_every_file(tmp_path, monkeypatch):
    store = support.opened("files", tmp_path / "0")
    support.write(store, np.random.default_rng(0))
    waited, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: waited.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    store.flush()
    there = {str(p) for p in (tmp_path / "0").iterdir()}
    assert set(waited) == there | {str(tmp_path / "0")}
    assert waited[-2:] == [str(tmp_path / "0"), str(tmp_path / "0" / "head")]
    with mock.patch.object(os, "fsync", side_effect=OSError(5, "Input/output error")):
        pytest.raises(OSError, store.flush).match(r"cannot flush .*Input/output error.*Check the disk under")
    support.check(store)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize(
    ("kind", "verify"), by_tier(("memmap", True), more=[("memmap", False), ("files", True), ("files", False)])
)
@pytest.mark.more
def test_truncated_and_flipped_files_show_no_wrong_row(kind, verify, tmp_path):
    support.check_damages(kind, verify, False, tmp_path)


@pytest.mark.usefixtures("small_segments")
@KIND
def test_foreign_and_missing_files_are_found(kind, tmp_path):
    for seed, name in enumerate(("mine", "other")):
        support.small(kind, tmp_path / name, 4, seed)
    rows = support.rows_there(kind, tmp_path / "mine")
    for file in sorted(p.name for p in (tmp_path / "mine").iterdir() if p.name != "lock"):
        for foreign in (True, False):
            path = tmp_path / "mixed"
            shutil.copytree(tmp_path / "mine", path)
            (path / file).unlink()
            if foreign and (tmp_path / "other" / file).exists():
                shutil.copy(tmp_path / "other" / file, path / file)
            said = support.survives(kind, path, rows, **support.SMALL)
            assert said, f"{file} {'of another store' if foreign else 'missing'} went unnoticed"
            if not foreign and file == "column1.sums":
                with pytest.raises(StoreCorrupted, match="column1.sums is missing; expected every file"):
                    support.opened(kind, path, **support.SMALL, resume=True)
            shutil.rmtree(path)


@pytest.mark.usefixtures("small_segments")
def test_a_file_that_cannot_be_looked_for_is_not_missing(tmp_path, monkeypatch):
    support.small("memmap", tmp_path, 4, 0)
    rows = support.rows_there("memmap", tmp_path)
    for call in ("stat", "lstat"):  # whichever is used
        real = getattr(os, call)

        def fails(path, *args, real=real, **settings):
            if str(path).endswith(("column1.sums", "changes", "changes.old")):
                raise OSError(errno.EIO, "the disk does not answer", str(path))
            return real(path, *args, **settings)

        monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="cannot look at .*: Input/output error"):
        support.opened("memmap", tmp_path, **support.SMALL, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    assert support.rows_there("memmap", tmp_path) == rows


@given(data=st.data())
def test_longest_valid_run_agrees_with_a_search(data):
    lanes, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    count = np.array(data.draw(st.lists(st.integers(0, 30), min_size=lanes, max_size=lanes)))
    low = np.maximum(count - data.draw(st.integers(length, 12)), 0)
    bad = [(e, r) for e in range(lanes) for r in range(int(low[e]), int(count[e])) if data.draw(st.integers(0, 9)) == 0]
    pairs = np.array(bad, np.int64).reshape(-1, 2)
    chunks = data.draw(st.lists(st.integers(1, 4), max_size=2))
    invalid = [(pairs[i::2, 0], pairs[i::2, 1]) for i in range(2)]
    flushed = np.array([data.draw(st.integers(0, int(c))) for c in count]) if data.draw(st.booleans()) else count
    stop, held = longest_valid_run(low, count, length, invalid, chunks, flushed)
    for e in range(lanes):
        mine = {r for lane, r in bad if lane == e}
        if not mine:
            assert (stop[e], held[e]) == (count[e], min(count[e] - low[e], length))
            continue
        kept = range(int(stop[e] - held[e]), int(stop[e]))
        assert not mine & set(kept) and 0 <= held[e] <= length and stop[e] <= count[e]
        assert held[e] in (0, length) or stop[e] == held[e] or (stop[e] - held[e]) % length
        assert all(stop[e] >= count[e] // k * k or stop[e] % k == 0 for k in chunks)
        ends = [n for n in range(int(count[e]) + 1) if all(n >= count[e] // k * k or n % k == 0 for k in chunks)]
        edges = [int(low[e]) - 1, *sorted(mine), int(count[e])]
        runs = [range(a + 1, max(n for n in ends if n <= b)) for a, b in itertools.pairwise(edges)]
        named = range(max(int(count[e]) - length, 0), int(flushed[e]))
        rows = named if any(set(run) & set(named) for run in runs) else range(int(count[e]))
        best = max(runs, key=lambda run: (len(set(run) & set(rows)), run.start))
        assert set(kept) <= set(best[-length:]) and len(kept) >= min(len(best), length) - 1


@given(data=st.data())
def test_a_checksum_covers_row_place_and_store(data):
    row = data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 28, 29, 400]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, seed = rng.integers(0, 256, (5, row), np.uint8), int(rng.integers(2**63))
    lane, count = rng.integers(0, 4, 5), rng.integers(0, 10**12, 5)
    sums = RowChecksums(seed, row)
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
    foreign = RowChecksums(seed ^ 1, row)
    assert (foreign.of(rows, foreign.names(lane, count)) != first).all()
    assert (first != 0).all()  # what a hole of the file says
