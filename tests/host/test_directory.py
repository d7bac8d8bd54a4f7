"""Test the directory of a store in files: who may open it, and when it is released."""

import gc
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from fbuf._host.codecs import Zstd
from fbuf._host.memory import file_arena
from tests.support.disk import make
from tests.support.disk_faults import Faults, resumed
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.store import columns_of, fetch
from tests.support.store_model import Model

OTHERS = [
    ({"lanes": 2}, "has lanes 1; expected 2"),
    ({"length": 17}, "has length 16; expected 17"),
    ({"slack": 5}, "has slack 4; expected 5"),
    ({"columns": columns_of(Zstd(chunk=4))}, "leaf 'c0' of the store at .* has codec None; expected Zstd"),
    ({"columns": columns_of(None, shape=(6,))}, r"leaf 'c0' of the store at .* has shape \[5\]; expected \[6\]"),
    ({"columns": columns_of(None, dtype="int8")}, "has dtype uint8; expected int8"),
    ({"columns": columns_of(None, None)}, "has leaves c0; expected c0, c1"),
]


def test_another_store_is_refused_unchanged(tmp_path):
    settings = {"columns": columns_of(None), "lanes": 1, "length": 16, "slack": 4}
    store = make(tmp_path, **settings)
    ticket = store.write([np.full((3, 1, 5), 7, np.uint8)], None)
    store.close()
    for change, message in OTHERS:
        raises(ValueError, f"Buffer.resume: .*{message}", make, tmp_path, **settings | change, resume=True)
    store = make(tmp_path, **settings, resume=True)
    assert (fetch(store, ticket)[0] == 7).all()
    store.close()
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 4}))
    raises(ValueError, "is of version 4, not 3", make, tmp_path, **settings, resume=True)


def test_a_directory_serves_one_store_at_a_time(tmp_path):
    first = make(tmp_path, columns_of(None))
    for resume in (False, True):
        with pytest.raises(BlockingIOError, match="in use by this process; expected no other user. Drop every state"):
            make(tmp_path, columns_of(None), resume=resume)
    first.close()
    raises(FileExistsError, r" has a store. Use buffer.resume\(example\)", lambda: make(tmp_path, columns_of(None)))
    second = make(tmp_path, columns_of(None), resume=True)
    del second  # let go of, not closed
    make(tmp_path, columns_of(None), resume=True)


def test_a_directory_with_foreign_files_is_refused(tmp_path):
    raises(FileNotFoundError, "Buffer.resume: no store", lambda: make(tmp_path / "none", columns_of(None), resume=True))
    assert not (tmp_path / "none").exists()
    make(tmp_path / "half", columns_of(None)).close()
    (tmp_path / "half" / "manifest.json").unlink()
    make(tmp_path / "half", columns_of(None))
    (tmp_path / "notes.txt").write_text("mine")
    raises(FileExistsError, r"holds other files \(.*\); expected none", lambda: make(tmp_path, columns_of(None)))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_temporary_directory_is_removed_with_its_store(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = make(None, columns_of(None))
    ticket = store.write([np.ones((3, 1, 5), np.uint8)], None)
    assert len(list(tmp_path.iterdir())) == 1
    out = np.zeros((3, 5), np.uint8)
    there = np.ones(3, bool)
    fetching = store._parts[0].fetch(np.zeros(3, int), np.arange(3), there, store._count, np.zeros(1, int))
    del store
    assert list(tmp_path.iterdir()) == []
    fetching.run([memoryview(out.reshape(-1))])  # a read under way finishes
    assert (out == 1).all() and ticket.all()
    store = make(None, columns_of(None))
    store.close()
    assert list(tmp_path.iterdir()) == []
    Faults(monkeypatch).left = 3  # whether the lock says who holds it is no matter
    pytest.raises(OSError, make, None, columns_of(None))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_files_are_sparse(tmp_path):
    columns = columns_of(None, shape=(1000,))
    store = make(tmp_path, columns, length=10_000_000)
    assert store.disk < 64 * 1024
    store.write([np.ones((100, 1, 1000), np.uint8)], None)
    assert (tmp_path / "column0.rows").stat().st_size > 10**10
    assert store.disk < 300_000 and store.nbytes < 1000


def test_empty_segments_are_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(file_arena.FileArena, "small", 16_384)
    columns = columns_of(Zstd(chunk=2, dictionary=0), shape=(300,))
    model = Model(make(tmp_path, columns, lanes=2, length=60, slack=0))
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


FULL = """
import shutil, sys, numpy as np
from fbuf._host.codecs import Zstd
from tests.support.disk import make
from tests.support.store import columns_of, fetch

def fill(path, codec):
    columns = columns_of(codec, shape=(5000,))
    store = make(path + "/store", columns, length=4000, slack=0)
    other = make(path + "/other", columns_of(None, shape=(5000,)), lanes=2, length=4000, slack=0)
    other.write([np.ones((1, 2, 5000), np.uint8)], np.array([[False, True]]))
    rng, kept, errors = np.random.default_rng(0), [], 0
    while errors < 20:
        rows = np.zeros((7, 1, 5000), np.uint8)
        rows[..., :3000] = rng.integers(0, 256, (7, 1, 3000))
        try:
            kept.append((store.write([rows], None), rows))
        except OSError as error:
            errors += 1
            assert "cannot write" in str(error) or "cannot give" in str(error), error
    assert len(kept) * 7 * 3000 > 2_000_000, len(kept)
    assert fetch(other, [9, 2])[1].tolist() == [False, True]  # a look at the hole before that row would need room
    for turn in range(2):
        for tickets, rows in kept:
            got, ok = fetch(store, tickets)
            assert ok.all() and (got == rows).all()
        store.close()
        store = make(path + "/store", columns, length=4000, slack=0, resume=True)
    assert int(store.newest()[0][0]) == 7 * len(kept)
    for each in (store, other):
        each.close()
        shutil.rmtree(each._folder.path)

fill(sys.argv[1], None)
fill(sys.argv[1], Zstd(chunk=2))
"""


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.more
def test_a_full_disk_raises_an_error(small_disk):
    run_python(FULL, small_disk, options=("-W", "ignore"))


ANOTHER = """
import os, resource, sys
from tests.support.disk import make
from tests.support.refusals import raises
from tests.support.store import columns_of
there = f"in use by process {os.getppid()}; expected no other user"
raises(BlockingIOError, there, make, sys.argv[1], columns_of(None), resume=True)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
large = r"File too large.*Raise the limit on the size of files \\(ulimit -f\\)"
raises(OSError, large, make, sys.argv[1] + "/store", columns_of(None, shape=(5000,)), length=4000)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
store = make(None, columns_of(None))
if os.fork() == 0:
    sys.exit()
os.wait()
print(os.path.exists(store._folder.path))
raise KeyError("an error")
"""


@pytest.mark.more
def test_another_process_hears_of_locks_and_limits_and_its_directory_outlives_forks(tmp_path):
    store, own = make(tmp_path / "used", columns_of(None)), tmp_path / "own"
    own.mkdir()
    command = [sys.executable, "-W", "ignore", "-c", ANOTHER, str(tmp_path / "used")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(own)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "True\n" and "KeyError: 'an error'" in done.stderr, done.stderr
    assert list(own.iterdir()) == []  # temporary, and gone with its process
    store.close()
