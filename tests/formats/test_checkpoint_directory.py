"""Checkpoint folders: what is refused, who may write, which generation is loaded, and what happens to other files."""

import errno
import fcntl
import functools
import os
import threading
import warnings
from unittest import mock

import numpy as np
import pytest

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import filesystem
from fbuf._host.types import StoreCorrupted
from tests.support.hostile_manifests import signed
from tests.support.memory_disk import PATH, Blocks, Faulty, Keyed, Memory, disk_of, load, same, save, sources, state
from tests.support.refusals import raises
from tests.support.threads import Thread


class Odd:
    shape, dtype = (4, 2), np.dtype(np.float32)

    def __getitem__(self, rows):
        return np.zeros((4, 3), np.float32)


INVALID = [
    ({"a": np.array([object()])}, TypeError, "array 'a' is object; expected numbers"),
    ({"a": np.array(["x"])}, TypeError, "array 'a' is <U1; expected numbers"),
    ({"a": np.zeros(2, [("x", "i4")])}, TypeError, "expected numbers"),
    ({"a": np.zeros(2, "V2")}, TypeError, "expected numbers"),
    ({"a": np.zeros(2, "M8[s]")}, TypeError, "expected numbers"),
    ({"a": np.zeros(2, np.longdouble)}, TypeError, "expected numbers"),
    ({"a": [1, 2]}, TypeError, "array 'a' is list; expected an array.*numpy.asarray"),
    ({3: np.zeros(2)}, ValueError, "name 3; expected printable text"),
    ({"a\n": np.zeros(2)}, ValueError, "expected printable text"),
    ({"a": Odd()}, ValueError, r"float32\[4, 3\] for rows 0 to 4; expected float32\[4, 2\]"),
    ({"a": np.zeros((1,) * 33)}, ValueError, "33 axes; expected at most 32"),
    ({"a": Blocks(np.zeros(9), 0)}, ValueError, "blocks of 0 rows"),
    ({"a": Blocks(np.zeros(9), 4, ["a"])}, ValueError, "1 marks; expected 3"),
    ({"a": Blocks(np.zeros(1 << 20), 1)}, ValueError, "1048577 blocks; expected at most .* larger blocks"),
]


def test_invalid_arrays_are_refused_before_anything_is_written():
    disk = disk_of(1)
    before = disk.contents()
    for arrays, error, message in INVALID:
        raises(error, message, checkpoint.write, PATH, {"fine": np.zeros(3), **arrays}, {}, disk=disk)
        assert disk.contents() == before


def test_invalid_cuts_keys_and_meta_are_refused():
    source = Keyed({"a": np.zeros(3, np.uint8), "b": np.zeros(6, np.uint8)})
    for cuts in ([0], [0, 3], [1, 3, 9], [0, 5, 3, 9], [0, 3, 8]):
        source.cuts = np.array(cuts)
        raises(ValueError, "has cuts", lambda: checkpoint.write(PATH, {"a": source}, {}, disk=Memory()))
    source.cuts, source.keys = np.array([0, 3, 9]), ["a", "a"]
    raises(ValueError, "keys that repeat", lambda: checkpoint.write(PATH, {"a": source}, {}, disk=Memory()))
    for value in ({1: 2}, [object()], float("nan"), b"x", np.int64(3)):
        raises((TypeError, ValueError), None, checkpoint.write, PATH, {}, {"a": value}, disk=Memory())
    deep = functools.reduce(lambda inner, _: [inner], range(5000), [])
    raises(ValueError, "nested more than 64 deep", lambda: checkpoint.write(PATH, {}, {"a": deep}, disk=Memory()))


def test_a_missing_checkpoint_is_named_and_nothing_is_created(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        raises(checkpoint.CheckpointNotFound, "no checkpoint at .* Give the path", checkpoint.read, str(path))
    assert not list(tmp_path.iterdir())


def test_where_nothing_may_be_written_no_source_is_read():
    for number in (errno.EACCES, errno.EROFS):
        given, disk = sources(3), Faulty(Memory(), 0, number, kinds=("open",))
        raises(OSError, "Use a path that this process may write to", checkpoint.write, PATH, given, {}, disk=disk)
        assert given["log"].reads == given["table"].reads == given["priority"].reads == 0


def test_one_process_saves_at_a_time(tmp_path):
    save(str(tmp_path), 1)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("12345", end="", file=lock, flush=True)  # its process
        raises(BlockingIOError, "in use by process 12345; .*Wait for that save, or", save, str(tmp_path), 2)
        assert load(str(tmp_path)) == 1
    save(str(tmp_path), 2)
    assert load(str(tmp_path)) == 2


@pytest.mark.more
def test_a_folder_that_replaced_that_of_a_save_is_not_changed(tmp_path):
    class Replaced(Faulty):  # before the n-th call, another checkpoint is moved to the path
        def _fail(self):
            path.rename(folder / "away")
            other.rename(path)

    ends, at = set(), 1  # the first opens the lock
    while True:
        folder = tmp_path / str(at)
        path, other = folder / "replay", folder / "other"
        for k in range(4):
            save(path, k, sync=False)
        for k in range(4, 8):
            save(other, k, sync=False)
        before = {file.name: file.read_bytes() for file in other.iterdir()}
        disk = Replaced(at=at, kinds=("open", "pwritev", "pread", "size", "fsync", "listdir"))
        try:
            with warnings.catch_warnings(record=True, action="always") as said:
                save(path, 8, disk)
        except (OSError, StoreCorrupted) as error:
            ends.add(type(error))
        if not disk.failed:
            break
        after = {file.name: file.read_bytes() for file in path.iterdir()}
        assert {name: after[name] for name in before} == before
        if said:
            assert "was removed or replaced during the save" in str(said[0].message)
            assert load(folder / "away") == 8
        else:
            assert load(folder / "away") in (3, 8) and load(path) == 7
        at += 1
    assert at > 20 and FileNotFoundError in ends


def test_one_thread_saves_to_a_path_at_a_time(tmp_path):
    inside, go = threading.Event(), threading.Event()

    def slowly(done, total):
        inside.set()
        assert go.wait(60)

    first = Thread(lambda: save(str(tmp_path), 1, progress=slowly))
    assert inside.wait(60)
    raises(BlockingIOError, "in use by this process", save, str(tmp_path), 2)
    go.set()
    first.ends()
    assert load(str(tmp_path)) == 1


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    with (
        mock.patch("fbuf._host.io.lock.fcntl.flock", side_effect=OSError(errno.ENOLCK, "no locks")),
        pytest.warns(RuntimeWarning, match="has no locks"),
    ):
        save(str(tmp_path), 1)
    assert load(str(tmp_path)) == 1


@pytest.mark.more
def test_readers_see_whole_saves_while_a_writer_prunes(tmp_path):
    save(str(tmp_path), 0, keep=1, sync=False)
    stop = threading.Event()

    def reader():
        last = 0
        while not stop.is_set():
            k = load(str(tmp_path))
            assert k >= last
            last = k

    threads = [Thread(reader) for _ in range(2)]
    for k in range(1, 60):
        save(str(tmp_path), k, keep=1, sync=False)
    stop.set()
    for thread in threads:
        thread.ends()


def test_an_open_reader_keeps_its_generation(tmp_path):
    save(str(tmp_path), 1, keep=1)
    saved = checkpoint.read(str(tmp_path), verify="lazy")
    for k in range(2, 6):
        save(str(tmp_path), k, keep=1)
    same(saved, state(1))
    saved.close()
    saved.close()
    pytest.raises(ValueError, lambda: saved.arrays["log"][:]).match("closed")


def test_files_of_others_stay(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{}")
    pytest.raises(FileExistsError, lambda: save(str(tmp_path / "store"), 1)).match("holds a live store")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        raises(OSError, "Use the path of a folder", save, str(path), 1)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "notes.txt").write_text("mine")
    for k in range(4):
        save(str(tmp_path / "mixed"), k, keep=1)
    assert (tmp_path / "mixed" / "notes.txt").read_text() == "mine" and load(str(tmp_path / "mixed")) == 3
    (tmp_path / "link").symlink_to(tmp_path / "mixed")
    save(str(tmp_path / "link"), 4)
    assert load(str(tmp_path / "mixed")) == load(str(tmp_path / "link")) == 4
    save(str(tmp_path / "new" / "deep" / "er"), 1)
    assert load(str(tmp_path / "new" / "deep" / "er")) == 1


def test_after_the_last_number_nothing_is_saved(tmp_path):
    save(str(tmp_path), 0)
    (tmp_path / "manifest-999999999999.json").touch()
    raises(FileExistsError, "has no number left", save, str(tmp_path), 1)
    with pytest.warns(RuntimeWarning, match="generation 1 of"):
        assert load(str(tmp_path)) == 0


def test_a_later_version_is_neither_damage_nor_overwritten():
    disk = disk_of(1, 2)
    name = "manifest-000000000002.json"
    disk.put(name, signed(disk.contents()[name].split(b"\n")[1].replace(b'{"version":1,', b'{"version":2,'), 2))
    before = disk.contents()
    raises(checkpoint.VersionError, f"{name} is of version 2; expected 1 or less. Use the release", load, PATH, disk)
    pytest.raises(checkpoint.VersionError, save, PATH, 3, disk)
    assert disk.contents() == before


def test_files_that_cannot_be_opened_are_not_removed(monkeypatch):
    class Full(Faulty):  # from the n-th call on no file can be opened to be read
        def _call(self, kind):
            def call(*args):
                if kind == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
                    self.count += 1
                    if self.at is not None and self.count > self.at:
                        self._fail()
                return getattr(self.disk, kind)(*args)

            return call

    monkeypatch.setattr(filesystem, "_PAUSES", (0.0,))
    disk, kept = disk_of(1, 2, 3, keep=3), 0
    counter = Full(disk.copy())
    save(PATH, 4, counter, keep=3)
    for at in range(counter.count):
        trial = disk.copy()
        with warnings.catch_warnings(record=True, action="always") as told:
            try:
                save(PATH, 4, Full(trial, at, errno.EMFILE), keep=3)
            except OSError as error:
                assert "ulimit -n" in str(error)
                continue
        assert "older ones were not removed" in str(told[0].message)
        assert "manifest-000000000001.json" in trial.contents()
        kept += 1
    assert kept > 1


def test_the_generation_before_is_loaded_with_a_warning():
    disk = disk_of(1, 2)
    whole = disk.copy()
    disk.names["data-000000000002.safetensors"].data[-3] ^= 4
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="generation 1 of .* is loaded, not the newest.*2: .*step") as told:
            assert load(PATH, disk) == 1
        assert len(told) == 1
    raises(checkpoint.StoreCorrupted, "bytes [0-9]+ to [0-9]+, rows 0 to 1 of array", load, PATH, disk, verify="lazy")
    disk.names["manifest-000000000001.json"].data[100] ^= 1
    raises(checkpoint.StoreCorrupted, "no generation at .* is whole.*generation 2: .*generation 1: ", load, PATH, disk)
    del whole.names["manifest-000000000001.json"]
    assert load(PATH, whole) == 2


def test_a_save_after_falling_back_keeps_the_whole_generation():
    for read in (checkpoint.read, lambda path, **how: checkpoint.restore(path, lambda saved: saved.meta, **how)):
        disk = Memory()
        for k in (1, 2):
            rows = np.full(40, k, np.uint8)
            checkpoint.write(PATH, {"a": Blocks(rows, 8, [f"{k}-{b}" for b in range(5)])}, {"k": k}, disk=disk)
        disk.names["data-000000000002.safetensors"].data[-3] ^= 1
        with pytest.warns(RuntimeWarning, match="not the newest"):
            read(PATH, disk=disk)
        checkpoint.write(PATH, {"a": Blocks(rows, 8, [f"2-{b}" for b in range(5)])}, {"k": 3}, disk=disk)
        assert np.array_equal(np.asarray(checkpoint.read(PATH, disk=disk).arrays["a"]), rows)
        left = sorted(n for n in disk.contents() if n[0] == "m")
        assert left == ["manifest-000000000001.json", "manifest-000000000003.json"]


@pytest.mark.parametrize("fault", ["missing", "short", "long", "empty", "folder", "link", "pipe"])
def test_a_replaced_file_is_noticed(fault, tmp_path):
    for name in ("data-000000000002.safetensors", "manifest-000000000002.json"):
        folder = tmp_path / name
        save(str(folder), 1)
        save(str(folder), 2)
        file = folder / name
        data = file.read_bytes()
        file.unlink()
        if fault in ("short", "long", "empty"):
            file.write_bytes({"short": data[:-1], "long": data + b" ", "empty": b""}[fault])
        elif fault == "folder":
            file.mkdir()
        elif fault == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
        elif fault == "pipe":
            os.mkfifo(file)
        with warnings.catch_warnings(record=True, action="always") as told:
            assert load(str(folder)) == 1
        assert len(told) == (not (fault == "missing" and name.startswith("manifest")))
        assert fault != "link" or "is a link; expected a plain file" in str(told[0].message)
        with warnings.catch_warnings(record=True, action="always") as told:
            save(str(folder), 3)  # builds on the whole generation
        assert ["cannot remove" in str(w.message) for w in told] == [True] * (fault == "folder")
        assert load(str(folder)) == 3


def test_a_file_of_another_run_is_noticed(tmp_path):
    for run in "ab":
        for k in (1, 2):
            arrays = {"x": np.full(100, k, np.uint8), "y": np.arange(100)}
            checkpoint.write(str(tmp_path / run), arrays, {"k": k}, keep=1)
    names = [p.name for p in (tmp_path / "a").iterdir() if p.name != "lock"]
    assert len(names) == 3
    for name in names:
        (tmp_path / "a" / name).rename(tmp_path / "held")
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        raises(checkpoint.StoreCorrupted, "a file of another save|no generation", checkpoint.read, str(tmp_path / "a"))
        (tmp_path / "held").rename(tmp_path / "a" / name)
    newest = (tmp_path / "a" / "manifest-000000000002.json").read_bytes()
    (tmp_path / "a" / "manifest-000000000009.json").write_bytes(newest)
    with pytest.warns(RuntimeWarning, match="it is of generation 2 and has the name of 9"):
        checkpoint.read(str(tmp_path / "a")).close()
