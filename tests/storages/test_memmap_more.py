"""Rows in files: their size, checkpoints, failed writes and other processes; see `tests/storages/test_memmap.py`."""

import dataclasses
import gc
import os

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Uniform
from fbuf.views import Sequence
from tests.storages.test_memmap import test_a_resumed_state_is_the_state_it_was  # noqa: F401
from tests.support.memmap import EXAMPLE, PLAIN, make, rows_of
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import same

pytestmark = pytest.mark.more

FRAMES = {"obs": EXAMPLE["obs"]}


way = one_of(("files", Sequence(3, autoreset="same_step"), Uniform(over="episodes"), 3, 31))
storage = one_of("memmap")
end = one_of("pass")


def test_sizes_are_those_of_the_disk(storage, tmp_path):
    buffer = make(storage, tmp_path, 200_000, **PLAIN)
    plan = buffer.plan(FRAMES)
    state = buffer.init(FRAMES)
    assert buffer.nbytes(state)["disk"] < 100_000 < 10**8 < plan.disk and plan.host < 2 * 10**6
    for i in range(10):
        state = buffer.extend(state, {"obs": rows_of(50 * i, 50, 2)["obs"]})
    jax.block_until_ready(state)
    for path in tmp_path.iterdir():  # a file system may count blocks late
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    sizes = buffer.nbytes(state)
    blocks = sum(p.stat().st_blocks * 512 for p in tmp_path.iterdir())
    assert sizes["disk"] == blocks == fbuf.stores()[-1].disk and f"{blocks} on disk" in repr(fbuf.stores()[-1])
    if storage == "memmap":
        assert 1000 * 1600 < blocks < 1000 * 1700 + 100_000 and sizes["host"] < 10_000
        few = make(storage, tmp_path / "few", 2000, **PLAIN)
        assert few.plan(FRAMES).disk == pytest.approx(2000 * 1600 * (1 + 1 / 16) ** 2, rel=0.02)
    else:
        assert blocks < 1000 * 1600 / 10
    with pytest.raises(OSError), fbuf.stores()[-1]:
        buffer.init(FRAMES)
    pytest.raises(RuntimeError, buffer.nbytes, state).match("not open in this process")


def test_a_checkpoint_of_one_loads_at_another_path(storage, tmp_path):
    buffer = make(storage, tmp_path / "one", **PLAIN)
    state = buffer.init(EXAMPLE)
    for i in range(5):
        state = buffer.extend(state, rows_of(4 * i, 4, 2))
    arrays = buffer.storage.to_arrays(state.rows)
    other = make(storage, tmp_path / "two", **PLAIN)
    spec, structure = buffer.storage.spec(state.rows)
    rows = other.storage.from_arrays(arrays, other.geometry, spec, structure)
    same(other.rows(dataclasses.replace(state, rows=rows)), buffer.rows(state))
    held = jax.device_get(buffer.rows(state))
    # Where a store lies, open or closed, or anything else, nothing is touched.
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "diary").write_text("dear")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for taken in ("one", "two", "three"):
        there = make(storage, tmp_path / taken, **PLAIN).storage
        with pytest.raises((FileExistsError, BlockingIOError), match=f"{taken} already exists and was not modified"):
            there.from_arrays(arrays, other.geometry, spec, structure)
    del rows, state
    raises(FileExistsError, "one already exists", buffer.storage.from_arrays, arrays, other.geometry, spec, structure)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path in before}
    same(other.rows(other.resume(EXAMPLE)), held)


def full(*args):
    raise OSError(28, "No space left on device")


def test_a_write_that_fails_under_jit_leaves_what_was_there(tmp_path, monkeypatch):
    """A donated state is not lost, and the rows can be resumed."""
    buffer = make("memmap", tmp_path, **PLAIN)
    state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12, 2)))
    held = jax.device_get(buffer.rows(state))

    step = jax.jit(lambda s, r: buffer.extend(s, r), donate_argnums=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(Exception, match="cannot write .*No space left on device.*are free there. Make room in"):
            jax.block_until_ready(buffer.extend(state, rows_of(12, 5, 2)))
        same(buffer.rows(state), held)
        state = step(state, rows_of(12, 5, 2))
        raises(OSError, "No space left.*10 rows were not written", jax.block_until_ready, state)
    same(buffer.rows(state), held)
    del state
    gc.collect()
    state = buffer.resume(EXAMPLE)
    same(buffer.rows(state), held)
    assert int(np.asarray(buffer.last(buffer.extend(state, rows_of(12, 5, 2)), 1).data["action"])[0, 0]) == 32


SCRIPT = """
import sys, jax, fbuf, numpy as np
from tests.support.memmap import make, rows_of, EXAMPLE
storage, path, end = sys.argv[1:]
buffer = make(storage, path)
state = buffer.init(EXAMPLE)
first = int(buffer.size(state))
for i in range(3):
    state = jax.block_until_ready(buffer.extend(state, rows_of(first + 4 * i, 4, 2)))
print(np.asarray(buffer.rows(state).data["action"]).sum(), flush=True)
exec(end)
"""


def test_another_process_goes_on(storage, end, tmp_path):
    done = run_python(SCRIPT, storage, tmp_path, end)
    buffer = make(storage, tmp_path)
    state = buffer.resume(EXAMPLE)
    assert int(np.asarray(buffer.rows(state).data["action"]).sum()) == int(done.stdout) == np.arange(24).sum()


def test_replay_goes_on_with_rows_in_files_after_a_failed_write(tmp_path, monkeypatch):
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    replay = fbuf.Replay(buffer, {"t": 0})
    replay.extend({"t": np.arange(5, dtype=np.int32)})
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        raises(OSError, "No space left.*5 rows were not written", replay.extend, {"t": np.arange(5, dtype=np.int32)})
    raises(TypeError, r"example is a BufferState; expected one row", fbuf.Replay, buffer, replay.state)
    assert len(replay) == 5 and len(replay.sample(2).data["t"]) == 2
    del replay
    again = fbuf.Replay(buffer, {"t": 0}, resume=True)
    assert np.asarray(again.rows().data["t"])[:5].tolist() == [0, 1, 2, 3, 4] and len(again) == 5
