"""Checkpoints that survive: killed processes, failing and full disks, failures of power, damaged bytes.

The rows of the catalogue of faults that concern files: whatever happens while one is saved, what is loaded afterwards is wholly
the old or wholly the new one, and no damaged byte is ever taken for a good one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from fbuf import _files
from tests.checkpoints import PATH, Blocks, Faulty, File, Killed, Memory, load, same, save

ROOT = Path(__file__).resolve().parent.parent
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")


# ------------------------------------------------------------------------------------------------- kills and bad calls


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what is asked of the disk is not what these tests are about."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


def saver(mode: str, path: Path, count: int, seed: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.saver", mode, str(path), str(count), str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kills_at_random_moments(quick: Path) -> None:
    """Rows 1 and 2: 20 kills, 200 with FBUF_EXHAUSTIVE=1."""
    count = 200 if EXHAUSTIVE else 20
    seen = saver("random", quick / "c", count, 0)
    assert seen["kills"] == count
    assert not EXHAUSTIVE or min(seen["old"], seen["new"], seen["none"], seen["left behind"]) > 0, seen


def test_kills_at_every_call(quick: Path) -> None:
    """Rows 1 to 3: before every single call to the system of a first save, and of one that removes old files."""
    seen = saver("calls", quick / "c", 0, 0)
    assert seen["kills"] > 60 and min(seen["old"], seen["new"], seen["none"]) > 0


@pytest.mark.parametrize("dead", [False, True], ids=["once", "from there on"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, None], ids=["EIO", "ENOSPC", "killed"])
def test_every_call_fails_once(number: int | None, dead: bool) -> None:
    """Rows 3, 5, 6: the n-th call fails, for every n; once, so that the rest is cleaned up, or so do all after it."""
    base = Memory()
    save(PATH, 1, base)
    save(PATH, 2, base)
    for at in range(1000):
        disk = base.copy()
        faulty = Faulty(disk, at, number, dead=dead)
        ended = told = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                save(PATH, 3, faulty)
                ended = True
            except OSError as error:
                assert error.errno == number and "fbuf" in str(error)
                told = True
            except Killed:
                told = True
        if not faulty.failed:
            break
        now = load(PATH, disk)
        assert now == 3 if ended else now in (2, 3)
        if told and number is not None and not dead:
            assert now == 2 and set(disk.contents()) == set(base.contents()), (
                "an error leaves what was there, and no more"
            )
        save(PATH, 4, disk, keep=1)
        assert load(PATH, disk) == 4
        newest = max(int(name[5:17]) for name in disk.contents() if name.startswith("data"))
        assert [n for n in sorted(disk.contents()) if n[0] == "m"] == [f"manifest-{newest:012d}.json"]
    assert at > 30


@pytest.mark.parametrize("at", range(8))
def test_writes_that_are_short(at: int) -> None:
    """Row 6: a write that takes half is gone on with; the next one after it that fails ends the save."""
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, Faulty(disk, at, kinds=("pwrite",), short=True))
    assert load(PATH, disk) == 2
    with pytest.raises(OSError, match="cannot write"):
        save(PATH, 3, Faulty(disk, at, kinds=("pwrite",), short=True, dead=True))
    assert load(PATH, disk) == 2


def test_removing_fails() -> None:
    """Row 3: a save that cannot remove what is old has saved, and says so."""
    disk = Memory()
    for k in (1, 2):
        save(PATH, k, disk)
    with pytest.warns(RuntimeWarning, match="cannot remove .*The next save tries again"):
        save(PATH, 3, Faulty(disk, 0, errno.EACCES, kinds=("unlink",), dead=True))
    assert load(PATH, disk) == 3
    save(PATH, 4, disk)
    assert sum(n.startswith("manifest") for n in disk.contents()) == 2


def test_reading_fails() -> None:
    """A part of the disk that cannot be read is damage: the generation before is taken, or the error says where."""
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, disk)
    good = Faulty(disk)
    load(PATH, good)
    fell_back = 0
    for at in range(good.count):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                fell_back += load(PATH, Faulty(disk, at, kinds=("pread", "open", "listdir"))) == 1
                assert len(told) <= 1
            except OSError as error:
                assert "cannot" in str(error)
            except _files.StoreCorrupted as error:
                assert "cannot be read at byte" in str(error)
    assert fell_back > 5


# -------------------------------------------------------------------------------------------------- no power, no room


def test_failures_of_power() -> None:
    """Row 4: after every call, any part of what was not waited for is lost or swapped; what was waited for never is."""
    chance = random.Random(0)
    each = 40 if EXHAUSTIVE else 6
    tried = 0
    for before in (0, 1, 3):
        base = Memory()
        for k in range(before):
            save(PATH, k, base)
        for at in range(1000):
            disk = base.copy()
            faulty = Faulty(disk, at, None, dead=True)
            try:
                save(PATH, before, faulty)
            except Killed:
                pass
            for left in disk.crashes(chance, each):
                tried += 1
                try:
                    now = load(PATH, left)
                except _files.CheckpointNotFound:
                    now = -1
                assert now in ((before - 1, before) if faulty.failed else (before,))
            if not faulty.failed:
                break
    assert tried > 400


@pytest.mark.parametrize("sync", [True, False])
def test_failures_of_power_in_a_save_of_nothing_new(sync: bool) -> None:
    """It waits for what the save before it did not wait for, and for its name."""
    chance = random.Random(0)
    for at in range(1000):
        disk = Memory()
        save(PATH, 1, disk)
        save(PATH, 2, disk, sync=sync)
        faulty = Faulty(disk, at, None, dead=True)
        with contextlib.suppress(Killed):
            assert save(PATH, 2, faulty).bytes_written < 4000  # a manifest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for left in disk.crashes(chance, 12):
                assert load(PATH, left) in ((1, 2) if faulty.failed and not sync else (2,))
        if not faulty.failed:
            break
    assert at > 10


class Dropping(Memory):
    """A disk that drops what it could not write when it is waited for; it is read still, and waited for again with success."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[File] = []

    def fsync(self, fd: int) -> None:
        file = self._open[fd]
        if file is not None and file in self.dropped:
            return
        if self.fails and file is not None and file.pending:
            file.pending = []
            self.dropped.append(file)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


def test_what_the_disk_failed_to_take_is_written_again() -> None:
    disk = Dropping()
    save(PATH, 1, disk, sync=False)
    disk.fails = True
    with pytest.raises(OSError, match="cannot sync"):
        save(PATH, 1, disk)
    disk.fails = False
    again = save(PATH, 1, disk)
    assert again.bytes_written > again.bytes_total
    assert save(PATH, 1, disk).bytes_written < again.bytes_written // 2  # a manifest: the new file is sound
    for left in disk.crashes(random.Random(0), 5):
        assert load(PATH, left) == 1


def test_a_save_that_does_not_wait_may_be_lost_but_never_lies() -> None:
    chance = random.Random(0)
    base = Memory()
    save(PATH, 1, base)
    disk = base.copy()
    save(PATH, 2, disk, sync=False)
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for left in disk.crashes(chance, 60):
            seen.add(load(PATH, left))
    assert seen == {1, 2}


def test_a_full_disk(tmp_path: Path) -> None:
    """Row 5: the limit on the size of files stands in for a disk that is full."""
    array = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    _files.write(str(tmp_path), {"a": array}, {"k": 1}, sync=False)
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(
            OSError, match="File too large.*ulimit -f.*the checkpoint that was there is as before"
        ) as caught:
            _files.write(str(tmp_path), {"a": array + 1}, {"k": 2}, sync=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG and sorted(os.listdir(tmp_path)) == before
    with _files.read(str(tmp_path)) as saved:
        same(saved, {"a": array})


def test_a_full_tmpfs(tmp_path: Path) -> None:
    """Row 5 on a file system of one megabyte, where one may be mounted."""
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True).returncode
    ):
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        path, rng = str(tmp_path / "c"), np.random.default_rng(0)
        array = rng.integers(0, 256, 400_000, np.uint8)
        _files.write(path, {"a": array}, {})
        with pytest.raises(OSError, match="No space left.*Make room in .*, or save to another path") as caught:
            _files.write(path, {"a": rng.integers(0, 256, 900_000, np.uint8)}, {})
        assert caught.value.errno == errno.ENOSPC
        with _files.read(path) as saved:
            same(saved, {"a": array})
        assert len(os.listdir(path)) == 3
        (tmp_path / "c" / "data-000000000009.safetensors").write_bytes(bytes(500_000))  # what a killed save left
        _files.write(path, {"a": array[::-1].copy()}, {}, keep=1)
        with _files.read(path) as saved:
            same(saved, {"a": array[::-1]})
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# ---------------------------------------------------------------------------------------------------- damaged bytes


def small(disk: Memory, k: int) -> None:
    """Save `k`, about one kilobyte."""
    arrays = {"a": Blocks(np.arange(12, dtype=np.uint8) + k // 2, 8), "b": np.array([k], np.int16)}
    _files.write(PATH, arrays, {"k": k}, disk=disk)


def outcome(disk: Memory, **how: str) -> int | None:
    """Which save is loaded, all of it; None: an error that says what is wrong."""
    try:
        with _files.read(PATH, disk=disk, **how) as saved:  # type: ignore[arg-type]
            k = saved.meta["k"]
            same(saved, {"a": np.arange(12, dtype=np.uint8) + k // 2, "b": np.array([k], np.int16)})
            return k
    except (_files.StoreCorrupted, _files.CheckpointNotFound):
        return None


def damaged_outcomes(generations: int, change: object, **how: str) -> list[tuple[int | None, bool]]:
    disk = Memory()
    for k in range(generations):
        small(disk, k)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in disk.contents():
            data = disk.names[name].data
            for what in change(len(data)):  # type: ignore[operator]
                whole = bytes(data)
                what(data)
                seen.append((outcome(disk, **how), name.startswith("data")))
                data[:] = whole
    assert outcome(disk) == generations - 1
    return seen


def flips(size: int) -> list:
    def flip(data: bytearray, bit: int) -> None:
        data[bit // 8] ^= 1 << bit % 8

    return [lambda data, bit=bit: flip(data, bit) for bit in range(8 * size)]


def cuts(size: int) -> list:
    return [lambda data, at=at: data.__delitem__(slice(at, None)) for at in range(size)]


@pytest.mark.parametrize("verify", ["full", "lazy"])
@pytest.mark.parametrize("change", [flips, cuts])
def test_every_flip_and_every_length_of_one_generation_is_an_error(change: object, verify: str) -> None:
    """Rows 12 and 13, all files, 100 %."""
    seen = damaged_outcomes(1, change, verify=verify)
    assert len(seen) > 800 and {k for k, _ in seen} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("change", [flips, cuts])
def test_every_flip_and_every_length_of_two_generations(change: object) -> None:
    """What is loaded is the newest where only the older needs what is damaged, the older, or an error; never other rows."""
    seen = damaged_outcomes(2, change)
    assert {k for k, _ in seen} == {0, 1, None} and len(seen) > 1500
    assert {k for k, data in seen if not data} == {0, 1}  # manifests are not shared


@pytest.mark.parametrize("verify", ["full", "lazy"])
def test_flips_of_a_larger_checkpoint(verify: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (4 << 20) if EXHAUSTIVE else 1 << 20, np.uint8)
    _files.write(str(tmp_path), {"a": array, "b": array[: 1 << 16].view(np.float32)}, {}, sync=False)
    (name,) = (n for n in os.listdir(tmp_path) if n.startswith("data"))
    size = (tmp_path / name).stat().st_size
    fd = os.open(tmp_path / name, os.O_RDWR)
    for _ in range(1000 if EXHAUSTIVE else 60):
        at, bit = int(rng.integers(size)), 1 << int(rng.integers(8))
        old = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([old[0] ^ bit]), at)
        with pytest.raises(_files.StoreCorrupted), _files.read(str(tmp_path), verify=verify) as saved:  # type: ignore[arg-type]
            for found in saved.arrays.values():
                np.asarray(found)
        os.pwrite(fd, old, at)
    os.close(fd)
    _files.read(str(tmp_path)).close()


# ------------------------------------------------------------------------------------------------------------- a model


class Machine(RuleBasedStateMachine):
    """Saves, kills, damage and loads in any order, beside a dictionary of what was saved."""

    @initialize()
    def start(self) -> None:
        self.disk, self.number = Memory(), 0
        self.saved: list[tuple[int, dict[str, np.ndarray]]] = []  # newest last
        self.arrays: dict[str, np.ndarray] = {}
        self.version: dict[tuple[str, int], int] = {}
        self.damaged: set[str] = set()  # manifests: a bit that is flipped twice is whole again
        self.counter = 0

    def source(self, name: str) -> Blocks:
        array = self.arrays[name]
        count = -(-len(array) // 4)
        marks = [f"{name}-{len(array)}-{self.version.get((name, b), 0)}" if b % 3 else None for b in range(count)]
        return Blocks(array, 4, marks)

    @rule(name=st.sampled_from("abc"), rows=st.integers(0, 20))
    def resize(self, name: str, rows: int) -> None:
        old = self.arrays.get(name, np.zeros((0, 2), np.int32))
        self.counter += 1
        self.arrays[name] = np.concatenate([old[:rows], np.full((max(rows - len(old), 0), 2), self.counter, np.int32)])
        for block in range(6):
            self.version[name, block] = self.counter

    @rule(name=st.sampled_from("abc"), row=st.integers(0, 19))
    def change(self, name: str, row: int) -> None:
        if name in self.arrays and row < len(self.arrays[name]):
            self.counter += 1
            self.arrays[name] = self.arrays[name].copy()
            self.arrays[name][row] = self.counter
            self.version[name, row // 4] = self.counter

    @rule(name=st.sampled_from("abc"))
    def drop(self, name: str) -> None:
        self.arrays.pop(name, None)

    @rule(keep=st.integers(1, 3), kill=st.none() | st.integers(0, 60))
    def save(self, keep: int, kill: int | None) -> None:
        self.number += 1
        arrays = dict(self.arrays)
        faulty = Faulty(self.disk, kill, None, dead=True)
        try:
            _files.write(PATH, {n: self.source(n) for n in arrays}, {"k": self.number}, keep=keep, disk=faulty)
            self.saved.append((self.number, arrays))
        except Killed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    with _files.read(PATH, disk=self.disk) as found:
                        if found.meta["k"] == self.number:
                            self.saved.append((self.number, arrays))
                except _files.CheckpointNotFound:
                    pass

    @rule(at=st.integers(0, 10**6))
    def damage_the_newest_manifest(self, at: int) -> None:
        names = sorted(n for n in self.disk.contents() if n.endswith("json") and n not in self.damaged)
        if len(names) > 1:
            self.damaged.add(names[-1])
            data = self.disk.names[names[-1]].data
            data[at % len(data)] ^= 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with _files.read(PATH, disk=self.disk) as found:
                    k = found.meta["k"]
            while self.saved[-1][0] != k:
                self.saved.pop()

    @invariant()
    def load(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not self.saved:
                with pytest.raises(_files.CheckpointNotFound):
                    _files.read(PATH, disk=self.disk)
                return
            with _files.read(PATH, disk=self.disk) as found:
                number, arrays = self.saved[-1]
                assert found.meta["k"] == number
                same(found, arrays)


def test_any_sequence_of_saves_kills_and_damage() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(stateful_step_count=20, max_examples=1000 if EXHAUSTIVE else 40)
    )
