"""Checkpoints survive killed processes, failing and full disks, power failures and damaged bytes."""

import contextlib
import errno
import itertools
import os
import random
import re
import resource
import warnings

import numpy as np
import pytest

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import data_file, directory, filesystem
from fbuf._formats.checkpoint.filesystem import data_name
from tests.support import checkpoint_faults as support
from tests.support.memory_disk import PATH, Faulty, Killed, Memory, disk_of, load, same, save
from tests.support.tables import by_tier


@pytest.fixture(autouse=True)
def several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small saves write in more than one call."""
    monkeypatch.setattr(data_file, "_WRITE_BLOCKS", 2)


@pytest.mark.parametrize(
    ("number", "dead"),
    by_tier(
        (errno.EIO, False),
        (None, True),
        more=itertools.product((errno.EIO, None, errno.ENOSPC), (False, True)),
        ids=lambda number, dead: f"{errno.errorcode.get(number, 'killed')}-{'from there on' if dead else 'once'}",
    ),
)
def test_every_call_fails_once(number, dead):
    base = disk_of(1, 2)
    for at in range(1000):
        disk = base.copy()
        faulty = Faulty(disk, at, number, dead=dead)
        ended = told = False
        with warnings.catch_warnings(action="ignore"):
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
            assert now == 2 and set(disk.contents()) == set(base.contents())
        save(PATH, 4, disk, keep=1)
        assert load(PATH, disk) == 4
        newest = max(int(name[5:17]) for name in disk.contents() if name.startswith("data"))
        assert [n for n in sorted(disk.contents()) if n[0] == "m"] == [f"manifest-{newest:012d}.json"]
    assert at > 30


@pytest.mark.parametrize("at", range(5))
def test_short_writes_are_continued(at: int) -> None:
    disk = disk_of(1)
    save(PATH, 2, Faulty(disk, at, kinds=("pwritev",), short=True))
    assert load(PATH, disk) == 2
    with pytest.raises(OSError, match="cannot write"):
        save(PATH, 3, Faulty(disk, at, kinds=("pwritev",), short=True, dead=True))
    assert load(PATH, disk) == 2


def test_a_save_that_cannot_remove_old_files_warns():
    disk = disk_of(1, 2)
    with pytest.warns(RuntimeWarning, match="cannot remove .*The next save tries again"):
        save(PATH, 3, Faulty(disk, 0, errno.EACCES, kinds=("unlink",), dead=True))
    assert load(PATH, disk) == 3
    save(PATH, 4, disk)
    assert sum(n.startswith("manifest") for n in disk.contents()) == 2


READS = ("open", "size", "pread", "listdir")
NUMBERS = (errno.EIO, errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.ESTALE, errno.ENOENT, errno.EAGAIN)


class Hiccups(Faulty):
    """Another disk whose n-th call that reads fails, and so do the same calls after it, `times` in all."""

    def __init__(self, disk, at, error, times):
        super().__init__(disk, at, error, READS)
        self.times, self.failing = times, None

    def _call(self, kind):
        def call(*args):
            if kind in READS:
                self.count += 1
                if self.failing is None and self.count - 1 == self.at:
                    self.failing, self.failed = kind, True
                if self.failing == kind and self.times:
                    self.times -= 1
                    self._fail()
            return getattr(self.disk, kind)(*args)

        return call


class Lasting(Hiccups):
    """Another disk of which no bytes can be read from the n-th `pread` on."""

    def _call(self, kind):
        def call(*args):
            if kind == "pread":
                self.count += 1
                if self.count > self.at:
                    self._fail()
            return getattr(self.disk, kind)(*args)

        return call

    def __init__(self, disk, at, error):
        super().__init__(disk, at, error, 0)


@pytest.mark.parametrize("times", by_tier(1, more=[2]))
def test_a_read_that_fails_is_repeated(times, monkeypatch):
    monkeypatch.setattr(filesystem, "_PAUSES", (0.0, 0.0))
    base = disk_of(1, 2)
    counter = Hiccups(base, -1, 0, 0)
    load(PATH, counter)
    for at, number in itertools.product(range(counter.count), NUMBERS if times == 1 else NUMBERS[:1]):
        disk = base.copy()
        faulty = Hiccups(disk, at, number, times)
        assert load(PATH, faulty) == 2 and faulty.failed  # without a warning, which would be an error
        if number == errno.EIO:
            save(PATH, 3, disk)
            assert "manifest-000000000002.json" in disk.contents() and load(PATH, disk) == 3
    assert at > 5


@pytest.mark.parametrize("number", by_tier(NUMBERS[0], more=NUMBERS))
def test_what_the_disk_does_not_read_is_neither_damaged_nor_removed(number, monkeypatch):
    monkeypatch.setattr(filesystem, "_PAUSES", (0.0,))
    base, damaged = disk_of(1, 2), set(directory.DAMAGED_SAVES)
    counter = Faulty(base, kinds=("pread",))
    load(PATH, counter)
    for at in range(counter.count):
        disk = base.copy()
        with pytest.raises(OSError, match="cannot read /checkpoint/.* at byte .*Try again; if it fails again") as told:
            load(PATH, Lasting(disk, at, number))
        assert told.value.errno == number and directory.DAMAGED_SAVES == damaged
        assert load(PATH, disk) == 2
    for at in range(2 * counter.count):  # a save builds on nothing that it cannot read, and removes nothing
        disk = base.copy()
        faulty = Hiccups(disk, at, number, 1 << 20)
        with warnings.catch_warnings(record=True, action="always") as told:
            try:
                save(PATH, 3, faulty)
            except OSError:
                assert load(PATH, disk) == 2
                continue
        assert load(PATH, disk) == 3
        if told:
            assert "older ones were not removed" in str(told[0].message)
            assert {"manifest-000000000001.json", "manifest-000000000002.json"} <= set(disk.contents())


def test_the_error_of_a_failing_disk_says_how_to_load_the_generation_before(tmp_path, monkeypatch):
    monkeypatch.setattr(filesystem, "_PAUSES", (0.0,))
    for k in (1, 2):
        save(str(tmp_path / "c"), k)

    class Failing(checkpoint.Disk):
        def pread(self, fd, out, at):
            if os.readlink(f"/proc/self/fd/{fd}").endswith("data-000000000002.safetensors"):
                raise OSError(errno.EIO, "bad sector")
            return super().pread(fd, out, at)

    with pytest.raises(OSError, match="or try generation 1: move .* away") as told:
        load(str(tmp_path / "c"), Failing())
    os.rename(re.search(r"move (\S+) away", str(told.value))[1], tmp_path / "away")
    assert load(str(tmp_path / "c"), Failing()) == 1


def test_bytes_that_are_wrong_once_are_not_damage():
    base = disk_of(1, 2)
    counter = Faulty(base, kinds=("pread",))
    load(PATH, counter)

    class Wrong(Faulty):
        def _call(self, kind):
            def call(*args):
                got = getattr(self.disk, kind)(*args)
                if kind == "pread":
                    self.count += 1
                    if self.count - 1 == self.at:
                        args[1][got // 2] ^= 1
                return got

            return call

    for at in range(1, counter.count):  # the first reads the manifest, which a load reads once
        assert load(PATH, Wrong(base, at)) == 2


def test_a_save_reads_a_damaged_generation_again_before_it_removes_it():
    for healed in (False, True):
        disk = disk_of(1, 2)
        file = disk.names["data-000000000002.safetensors"].data
        file[-3] ^= 1
        with pytest.warns(RuntimeWarning, match="not the newest"):
            assert load(PATH, disk) == 1
        file[-3] ^= healed
        for k, kept in ((3, {1, 2, 3} if healed else {1, 3}), (4, {3, 4})):
            save(PATH, k, disk)
            assert {int(n[9:21]) for n in disk.contents() if n[0] == "m"} == kept
            assert load(PATH, disk) == k


def test_power_failures_leave_the_old_or_the_new_save():
    assert support.power_failures(each=6, seed=0) > 400


def test_the_manifest_is_renamed_after_everything_else_is_synced(tmp_path):
    done = []

    class Watched(checkpoint.Disk):
        def fsync(self, fd):
            super().fsync(fd)
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

        def rename(self, old, new):
            done.append("rename")
            super().rename(old, new)

    for k in (1, 2):
        done.clear()
        save(str(tmp_path / "c"), k, Watched())
        at, number = done.index("rename"), f"00000000000{k}"
        before = done[:at] if k == 2 else done[1:at]  # the first save syncs the parent folder, too
        assert sorted(before) == ["c", f"data-{number}.safetensors", f"manifest-{number}.json.new"]
        assert done[at + 1 :] == ["c"]
    save(str(tmp_path / "c"), 3, sync=False)
    done.clear()
    save(str(tmp_path / "c"), 3, Watched())  # of nothing new: it names the file that was not synced
    names = ["c", "data-000000000003.safetensors", "manifest-000000000004.json.new"]
    assert sorted(done[: done.index("rename")]) == names


@pytest.mark.parametrize("error", [OSError(errno.EIO, "failed"), Killed()])
def test_a_save_fails_when_its_data_cannot_be_synced(tmp_path, error):
    class Broken(checkpoint.Disk):
        def fsync(self, fd):
            if "data-" in os.readlink(f"/proc/self/fd/{fd}"):
                raise error
            super().fsync(fd)

    path = str(tmp_path)
    save(path, 1)
    before = sorted(os.listdir(path))
    pytest.raises(type(error), save, path, 2, Broken())
    assert sorted(os.listdir(path)) == before and load(path) == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_folders_that_cannot_be_synced(number, monkeypatch):
    disk = Memory()
    whole = disk.fsync

    def fsync(fd):
        if disk._open[fd] is None:
            raise OSError(number, "a folder")
        whole(fd)

    monkeypatch.setattr(disk, "fsync", fsync)
    if number == errno.EIO:
        pytest.raises(OSError, save, PATH, 1, disk).match("cannot sync")
        assert not disk.contents()
    else:
        save(PATH, 1, disk)
        assert load(PATH, disk) == 1


@pytest.mark.parametrize("sync", by_tier(True, more=[False]))
def test_power_failures_in_a_save_of_nothing_new(sync):
    chance = random.Random(0)
    for at in range(1000):
        disk = disk_of(1)
        save(PATH, 2, disk, sync=sync)
        faulty = Faulty(disk, at, None, dead=True)
        with contextlib.suppress(Killed):
            assert save(PATH, 2, faulty).bytes_written < 4000  # a manifest
        with warnings.catch_warnings(action="ignore"):
            for left in disk.crashes(chance, 12):
                assert load(PATH, left) in ((1, 2) if faulty.failed and not sync else (2,))
        if not faulty.failed:
            break
    assert at > 10


def test_files_of_a_killed_save_are_removed_before_anything_is_written(monkeypatch):
    disk, left = disk_of(1), []
    disk.put(data_name(9), b"left")
    write = disk.pwritev
    monkeypatch.setattr(disk, "pwritev", lambda *given: (left.append(data_name(9) in disk.names), write(*given))[1])
    save(PATH, 2, disk)
    assert left and not any(left) and load(PATH, disk) == 2


class Dropping(Memory):
    """A disk whose failed sync drops the writes; it still reads them, and the next sync succeeds."""

    fails, dropped = False, ()

    def fsync(self, fd):
        file = self._open[fd]
        if file is not None and file in self.dropped:
            return
        if self.fails and file is not None and file.pending:
            file.pending = []
            self.dropped += (file,)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fsync(fd)


def test_writes_dropped_by_a_failed_sync_are_written_again():
    disk = Dropping()
    save(PATH, 1, disk, sync=False)
    disk.fails = True
    pytest.raises(OSError, save, PATH, 1, disk).match("cannot sync")
    disk.fails = False
    again = save(PATH, 1, disk)
    assert again.bytes_written > again.bytes_total
    assert save(PATH, 1, disk).bytes_written < again.bytes_written // 2  # a manifest: the new file is sound
    for left in disk.crashes(random.Random(0), 5):
        assert load(PATH, left) == 1


def test_a_full_disk(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    checkpoint.write(str(tmp_path), {"a": array}, {"k": 1}, sync=False)
    before = sorted(os.listdir(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match="File too large.*ulimit -f.*checkpoint that was there is as before"):
            checkpoint.write(str(tmp_path), {"a": array + 1}, {"k": 2}, sync=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(os.listdir(tmp_path)) == before
    with checkpoint.read(str(tmp_path)) as saved:
        same(saved, {"a": array})


@pytest.mark.parametrize("verify", ["full", "lazy"])
@pytest.mark.parametrize("change", by_tier(support.lengths, more=[support.flips]))
def test_every_flipped_bit_and_other_length_is_an_error(change, verify):
    seen = support.damaged_outcomes(1, change, verify=verify)
    assert len(seen) > 800 and {k for k, _ in seen} == {None}


def test_any_sequence_of_saves_kills_and_damage():
    support.any_sequence(examples=40)
