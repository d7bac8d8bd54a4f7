"""Buffers whose rows lie in files, through JAX: `Memmap`, `Compressed(path=...)` and `Buffer.resume`."""

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import Compressed, Device, Host, Memmap
from fbuf.views import Row, Sequence
from tests.support.memmap import EXAMPLE, PLAIN, TRANSITION, make, rows_of
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import same

PARTS: list[Any] = [(storage, TRANSITION, Prioritized(), 2) for storage in ("memmap", "files")]
PARTS += [("files", Sequence(3, autoreset="same_step"), Uniform(over="episodes"), 3), ("memmap", Row(), Epoch(), None)]


way = one_of(
    ("memmap", TRANSITION, Prioritized(), 2, 33),
    more=[("files", Sequence(3, autoreset="same_step"), Uniform(over="episodes"), 3, 31)],
    exhaustive=[*((*parts, rows) for parts in PARTS for rows in (7, 12, 31))],
)


def test_a_resumed_state_is_the_state_it_was(way: Any, tmp_path: Path) -> None:
    storage, view, sampler, lanes, rows = way
    buffer = make(storage, tmp_path, 12 * (lanes or 1), view=view, sampler=sampler, lanes=lanes)
    buffer = dataclasses.replace(buffer, episode_end=("terminated", "truncated"))
    plain = dataclasses.replace(buffer, storage=Device())
    step = jax.jit(lambda s, r: buffer.extend(s, r), donate_argnums=0)

    def batch(first: int, count: int) -> Any:
        made = rows_of(first, count, lanes or 1)
        return made if lanes else jax.tree.map(lambda x: x[:, 0], made)

    state, other = buffer.init(EXAMPLE), plain.init(EXAMPLE)
    for first in range(0, rows, 3):
        count = min(3, rows - first)
        state, other = step(state, batch(first, count)), plain.extend(other, batch(first, count))
    held = jax.device_get(buffer.rows(state))
    ring = jax.device_get(state.ring)
    del state
    gc.collect()
    state = buffer.resume(EXAMPLE, cut=False)
    same(buffer.rows(state), held)
    same(state.ring, ring)
    other = plain.convert(plain, other)
    for i in range(6):
        key = jax.random.key(i)
        state, mine = buffer.sample(state, key, 8)
        other, theirs = plain.sample(other, key, 8)
        same(mine, theirs)
        if sampler == Prioritized():
            state = buffer.update_priority(state, mine.index, np.arange(8, dtype=np.float32))
            other = plain.update_priority(other, theirs.index, np.arange(8, dtype=np.float32))
        state, other = step(state, batch(rows + 3 * i, 3)), plain.extend(other, batch(rows + 3 * i, 3))
    same(buffer.rows(state), plain.rows(other))


storage = one_of("memmap", exhaustive=["files"])


@pytest.mark.more
def test_masked_lanes_and_changed_rows_come_back(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path, 20, **PLAIN)
    state = buffer.init(EXAMPLE)
    rng = np.random.default_rng(0)
    for i in range(9):
        state = buffer.extend(state, rows_of(5 * i, 5, 2), mask=rng.random((5, 2)) < [0.9, 0.3])
    index = jax.tree.map(lambda x: x.reshape(-1), buffer.rows(state, last=4).index)
    new = {"reward": np.arange(8, dtype=np.float32), "obs": np.full((8, 40, 40), 255, np.uint8)}
    state = buffer.update_rows(state, index, new)
    new = {"reward": -np.ones(3, np.float32), "next": {"half": np.ones((3, 3), jnp.bfloat16)}}
    state = buffer.update_rows(state, jax.tree.map(lambda x: x[:3], index), new)
    held = jax.device_get(buffer.rows(state))
    for _ in range(2):
        del state
        state = buffer.resume(EXAMPLE)
        same(buffer.rows(state), held)
    state = buffer.extend(state, rows_of(100, 2, 2))
    assert (np.asarray(buffer.rows(state, last=2).data["action"]) == [[200, 201], [202, 203]]).all()


def test_a_path_that_holds_a_store_names_resume(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path, **PLAIN)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5, 2))
    for verb in (buffer.init, buffer.resume):
        raises(BlockingIOError, "in use by this process; expected no other user. Drop every state", verb, EXAMPLE)
    del state
    pytest.raises(FileExistsError, buffer.init, EXAMPLE).match(
        r"has a store\. Use buffer.resume\(example\), or Replay\("
    )
    assert int(buffer.size(buffer.resume(EXAMPLE))) == 10
    with pytest.raises(ValueError, match="Buffer.resume: the store at .* has length 12; expected 13"):
        make(storage, tmp_path, 26, **PLAIN).resume(EXAMPLE)
    with pytest.raises(ValueError, match="leaf 'action' of the store at .* has dtype int32; expected int16"):
        buffer.resume(EXAMPLE | {"action": np.int16(0)})
    with pytest.raises(ValueError, match="Buffer.resume: the store at .* has leaves action, next/half"):
        buffer.resume(EXAMPLE | {"more": 0})
    if storage == "files":
        other = fbuf.Buffer(24, lanes=2, storage=Compressed(path=str(tmp_path)))
        with pytest.raises(ValueError, match="leaf 'obs' of the .* has codec .*'chunk': 4.*; expected .*'chunk': 8"):
            other.resume(EXAMPLE)
    assert int(buffer.size(buffer.resume(EXAMPLE))) == 10


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    def resume(storage: Any) -> Any:
        return fbuf.Buffer(10, storage=storage).resume(EXAMPLE)

    raises(TypeError, r"Device\(\) keeps no files\. Use storages.Memmap\(path=", lambda: resume(Device()))
    for storage in (Host(), Compressed()):
        pytest.raises(ValueError, resume, storage).match(r"keeps its rows in memory, which is freed .*Write \w+\(path=")
    raises(ValueError, r"keeps its rows in a temporary folder, .*Write Memmap\(path=", lambda: resume(Memmap()))
    for storage in (Memmap(str(tmp_path), keys=("obs",)), Compressed(path=str(tmp_path), keys=("obs",))):
        raises(ValueError, "leaf 'action' of .* is on the device. Leave out keys", resume, storage)
    raises(FileNotFoundError, r"no store at .*\. Use buffer.init", lambda: resume(Memmap(str(tmp_path))))
    with pytest.raises(TypeError, match="Memmap: `resume` of a host storage cannot be traced"):
        jax.jit(lambda: resume(Memmap(str(tmp_path))))()
    pytest.raises(TypeError, Memmap, 3).match("Memmap: path is 3; expected the path of a folder, or None")
    assert Memmap(tmp_path) == Memmap(str(tmp_path))  # type: ignore[arg-type]
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(OSError, match=r"cannot make .*taken/lock.*Use the path of a folder; .*taken is a file"):
        fbuf.Buffer(10, storage=Memmap(str(tmp_path / "taken"))).init(EXAMPLE)


FRAMES = {"obs": EXAMPLE["obs"]}


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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
    assert int(np.asarray(buffer.rows(buffer.extend(state, rows_of(12, 5, 2)), last=1).data["action"])[0, 0]) == 32


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


end = one_of("pass", exhaustive=["import os; os._exit(0)"])


@pytest.mark.more
def test_another_process_goes_on(storage, end, tmp_path):
    done = run_python(SCRIPT, storage, tmp_path, end)
    buffer = make(storage, tmp_path)
    state = buffer.resume(EXAMPLE)
    assert int(np.asarray(buffer.rows(state).data["action"]).sum()) == int(done.stdout) == np.arange(24).sum()


@pytest.mark.more
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
