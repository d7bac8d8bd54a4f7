"""Buffers whose rows lie in files, through JAX: `Memmap`, `Compressed(path=...)` and `Buffer.resume`.

What they share with every host storage is shown where those are (`tests/test_host.py`, `tests/test_model.py`), what the files
hold in `tests/test_disk.py`; here that a state comes back, and what is said when it does not.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import Compressed, Device, Host, Memmap, Zstd
from fbuf.views import Row, Sequence, Transition

STORAGES = {
    "memmap": Memmap,
    "files": partial(Compressed, codec=Zstd(chunk=4)),
}
STORAGE = pytest.mark.parametrize("storage", STORAGES)
EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((40, 40), jnp.uint8),
    "next": {"half": jax.ShapeDtypeStruct((3,), jnp.bfloat16), "none": jax.ShapeDtypeStruct((0, 2), jnp.float32)},
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
    "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
    "small": jax.ShapeDtypeStruct((2,), jnp.float8_e4m3fn),
}
TRANSITION = Transition(n_step=2, stack=3, observation="obs")


FRAMES = {"obs": EXAMPLE["obs"]}
PLAIN: dict[str, Any] = {"view": Row(), "sampler": Uniform()}


def rows_of(first: int, count: int, lanes: int) -> dict[str, Any]:
    t = np.arange(first, first + count)[:, None] * lanes + np.arange(lanes)
    return {
        "obs": (t[..., None, None] % 251 * np.ones((40, 40))).astype(np.uint8),
        "next": {
            "half": np.repeat(t[..., None] % 100, 3, -1).astype(jnp.bfloat16),
            "none": np.zeros((*t.shape, 0, 2), np.float32),
        },
        "action": t.astype(np.int32),
        "reward": (t / 7).astype(np.float32),
        "terminated": t % 17 == 0,
        "truncated": t % 23 == 0,
        "small": np.repeat(t[..., None] % 8, 2, -1).astype(jnp.float8_e4m3fn),
    }


def make(storage: str, path: Any, capacity: int = 24, **settings: Any) -> fbuf.Buffer:
    parts: dict[str, Any] = {"view": TRANSITION, "sampler": Prioritized(), "lanes": 2} | settings
    return fbuf.Buffer(capacity, storage=STORAGES[storage](path=str(path)), **parts)


def same(one: Any, two: Any) -> None:
    one, two = jax.device_get((one, two))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


PARTS = [
    ("memmap", TRANSITION, Prioritized(), 2),
    pytest.param("files", TRANSITION, Prioritized(), 2, marks=pytest.mark.slow),
    ("files", Sequence(3), Uniform(over="episodes"), 3),
    pytest.param("memmap", Row(), Epoch(), None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("storage", "view", "sampler", "lanes"), PARTS)
@pytest.mark.parametrize("rows", [*(pytest.param(n, marks=pytest.mark.slow) for n in (7, 12)), 31])
def test_a_resumed_state_is_the_state_it_was(
    storage: str, view: Any, sampler: Any, lanes: int | None, rows: int, tmp_path: Path
) -> None:
    """The same rows in the same slots, drawn as from `convert`, which starts samplers anew too; and it goes on."""
    buffer = make(storage, tmp_path, 12 * (lanes or 1), view=view, sampler=sampler, lanes=lanes)
    buffer = dataclasses.replace(buffer, episode_end=("terminated", "truncated"))
    plain = dataclasses.replace(buffer, storage=Device())
    step = jax.jit(lambda s, r: buffer.extend(s, r), donate_argnums=0)

    def batch(first: int, count: int) -> Any:
        made = rows_of(first, count, lanes or 1)
        return made if lanes else jax.tree.map(lambda x: x[:, 0], made)

    state, other = buffer.init(EXAMPLE), plain.init(EXAMPLE)
    for first in range(0, rows, 4):
        count = min(4, rows - first)
        state, other = step(state, batch(first, count)), plain.extend(other, batch(first, count))
    held = jax.device_get(buffer.rows(state))
    ring = jax.device_get(state.ring)
    del state
    gc.collect()
    state = buffer.resume(EXAMPLE)
    same(buffer.rows(state), held)
    same(state.ring, ring)
    other = plain.convert(plain, other)
    for i in range(6):
        key = jax.random.key(i)
        state, mine = buffer.sample(state, key, 8)
        other, theirs = plain.sample(other, key, 8)
        same(mine, theirs)
        if sampler == Prioritized():
            state = buffer.update_priority(state, mine.index, jnp.arange(8.0))
            other = plain.update_priority(other, theirs.index, jnp.arange(8.0))
        state, other = step(state, batch(rows + 3 * i, 3)), plain.extend(other, batch(rows + 3 * i, 3))
    same(buffer.rows(state), plain.rows(other))


@STORAGE
def test_masked_lanes_and_changed_rows_come_back(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path, 20, view=Row(), sampler=Uniform())
    state = buffer.init(EXAMPLE)
    rng = np.random.default_rng(0)
    for i in range(9):
        state = buffer.extend(state, rows_of(5 * i, 5, 2), mask=rng.random((5, 2)) < [0.9, 0.3])
    index = jax.tree.map(lambda x: x.reshape(-1), buffer.last(state, 4).index)
    state = buffer.update_rows(state, index, {"reward": jnp.arange(8.0), "obs": jnp.full((8, 40, 40), 255, jnp.uint8)})
    state = buffer.update_rows(
        state,
        jax.tree.map(lambda x: x[:3], index),
        {"reward": -jnp.ones(3), "next": {"half": jnp.ones((3, 3), "bfloat16")}},
    )
    held = jax.device_get(buffer.rows(state))
    for _ in range(2):
        del state
        state = buffer.resume(EXAMPLE)
        same(buffer.rows(state), held)
    state = buffer.extend(state, rows_of(100, 2, 2))
    assert (np.asarray(buffer.last(state, 2).data["action"]) == [[200, 201], [202, 203]]).all()


@STORAGE
def test_a_path_that_holds_a_store_names_resume(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5, 2))
    for verb in (buffer.init, buffer.resume):
        with pytest.raises(BlockingIOError, match="in use by this process; expected nobody. Drop every state of it"):
            verb(EXAMPLE)
    del state
    with pytest.raises(FileExistsError, match=r"Go on with its rows: buffer.resume\(example\)"):
        buffer.init(EXAMPLE)
    assert int(buffer.size(buffer.resume(EXAMPLE))) == 10
    with pytest.raises(ValueError, match="Buffer.resume: the store at .* has length 12; expected 13"):
        make(storage, tmp_path, 26).resume(EXAMPLE)
    with pytest.raises(
        ValueError, match=r"Buffer.resume: leaf 'action' of the store at .* has dtype int32; expected int16"
    ):
        buffer.resume(EXAMPLE | {"action": np.int16(0)})
    with pytest.raises(ValueError, match="Buffer.resume: the store at .* has leaves action, next/half"):
        buffer.resume(EXAMPLE | {"more": 0})
    if storage == "files":
        other = fbuf.Buffer(24, lanes=2, storage=Compressed(path=str(tmp_path)))
        with pytest.raises(
            ValueError, match="leaf 'obs' of the store at .* has codec .*'chunk': 4.*; expected .*'chunk': 8"
        ):
            other.resume(EXAMPLE)
    assert int(buffer.size(buffer.resume(EXAMPLE))) == 10


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    def resume(storage: Any) -> Any:
        return fbuf.Buffer(10, storage=storage).resume(EXAMPLE)

    with pytest.raises(
        TypeError, match=r"Buffer.resume: Device\(\) keeps no files; .*storage=fbuf.storages.Memmap\(path="
    ):
        resume(Device())
    for storage in (Host(), Compressed()):
        with pytest.raises(ValueError, match=r"keeps its rows in memory, and they are gone .*Write \w+\(path="):
            resume(storage)
    with pytest.raises(ValueError, match=r"keeps its rows in a temporary folder, .*Write Memmap\(path="):
        resume(Memmap())
    for storage in (Memmap(str(tmp_path), keys=("obs",)), Compressed(path=str(tmp_path), keys=("obs",))):
        with pytest.raises(
            ValueError, match="leaf 'action' is kept on the device, not in the files of .*Leave keys out"
        ):
            resume(storage)
    with pytest.raises(
        FileNotFoundError, match=r"there is no store at .*; expected one. Make one with buffer.init\(example\)"
    ):
        resume(Memmap(str(tmp_path)))
    with pytest.raises(TypeError, match="Memmap: `resume` of a host storage cannot be traced"):
        jax.jit(lambda: resume(Memmap(str(tmp_path))))()
    with pytest.raises(TypeError, match="Memmap: path is 3; expected the path of a folder, or None"):
        Memmap(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot make .*file/lock: .*bytes are free there|cannot make .*/file/lock"):
        fbuf.Buffer(10, storage=Memmap(str(tmp_path / "file"))).init(EXAMPLE)
    assert Memmap(tmp_path) == Memmap(str(tmp_path))  # type: ignore[arg-type]


@STORAGE
def test_sizes_are_those_of_the_disk(storage: str, tmp_path: Path) -> None:
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
    with pytest.raises(RuntimeError, match="not open in this process"):
        buffer.nbytes(state)


@STORAGE
def test_a_checkpoint_of_one_loads_at_another_path(storage: str, tmp_path: Path) -> None:
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
        with pytest.raises((FileExistsError, BlockingIOError), match=f"{taken} is taken. What lies there stays"):
            there.from_arrays(arrays, other.geometry, spec, structure)
    del rows, state
    with pytest.raises(FileExistsError, match="one is taken"):
        buffer.storage.from_arrays(arrays, other.geometry, spec, structure)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path in before}
    same(other.rows(other.resume(EXAMPLE)), held)


def test_a_temporary_folder_goes_with_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = fbuf.Buffer(10, storage=Memmap())
    one, two = buffer.init({"x": 0}), buffer.init({"x": 0})
    assert len(list(tmp_path.iterdir())) == 2
    one = buffer.extend(one, {"x": jnp.arange(4)})
    batch = buffer.sample(one, jax.random.key(0), 4)[1]
    jax.block_until_ready((one, batch))
    del one
    fbuf.stores()
    assert len(list(tmp_path.iterdir())) == 1
    try:
        two = jax.block_until_ready(buffer.extend(two, {"x": jnp.arange(4)}))
        raise KeyError("the user's")
    except KeyError:
        del two
    fbuf.stores()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_under_jit_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that was donated is lost with the call, the rows are not: they can be resumed."""
    buffer = make("memmap", tmp_path, **PLAIN)
    state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12, 2)))
    held = jax.device_get(buffer.rows(state))

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    step = jax.jit(lambda s, r: buffer.extend(s, r), donate_argnums=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            Exception, match="cannot write .*No space left on device.*bytes are free there. Make room in"
        ):
            jax.block_until_ready(buffer.extend(state, rows_of(12, 5, 2)))
        same(buffer.rows(state), held)
        with pytest.raises(Exception, match="No space left"):
            jax.block_until_ready(step(state, rows_of(12, 5, 2)))
    del state
    gc.collect()
    state = buffer.resume(EXAMPLE)
    same(buffer.rows(state), held)
    assert int(np.asarray(buffer.last(buffer.extend(state, rows_of(12, 5, 2)), 1).data["action"])[0, 0]) == 32


SCRIPT = """
import sys, jax, fbuf, numpy as np
from tests.test_memmap import make, rows_of, EXAMPLE
storage, path, verb, end = sys.argv[1:]
buffer = make(storage, path)
state = getattr(buffer, verb)(EXAMPLE)
first = int(buffer.size(state))
for i in range(3):
    state = jax.block_until_ready(buffer.extend(state, rows_of(first + 4 * i, 4, 2)))
print(np.asarray(buffer.rows(state).data["action"]).sum())
exec(end)
"""


@pytest.mark.parametrize("end", ["pass", pytest.param("raise KeyError", marks=pytest.mark.slow)])
@STORAGE
def test_another_process_goes_on(storage: str, end: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    args = [sys.executable, "-c", SCRIPT, storage, str(tmp_path), "init", end]
    done = subprocess.run(args, capture_output=True, text=True, env=environment)
    assert done.returncode == (end != "pass"), done.stderr
    buffer = make(storage, tmp_path)
    state = buffer.resume(EXAMPLE)
    assert int(np.asarray(buffer.rows(state).data["action"]).sum()) == int(done.stdout) == np.arange(24).sum()


def test_replay_goes_on_with_rows_in_files_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    replay = fbuf.Replay(buffer, {"t": 0})
    replay.extend({"t": np.arange(5, dtype=np.int32)})
    with monkeypatch.context() as patched:
        real = os.pwrite

        def full(*args: Any) -> int:
            raise OSError(28, "No space left on device")

        patched.setattr(os, "pwrite", full)
        with pytest.raises(Exception, match="No space left"):
            replay.extend({"t": np.arange(5, dtype=np.int32)})
            len(replay)
        assert os.pwrite is not real
    with pytest.raises(RuntimeError, match=r"went with it; .*Replay\(buffer, example, resume=True\)"):
        replay.sample(2)
    with pytest.raises(TypeError, match=r"example is a BufferState; expected one row"):
        fbuf.Replay(buffer, replay.state)
    del replay
    again = fbuf.Replay(buffer, {"t": 0}, resume=True)
    assert np.asarray(again.rows().data["t"])[:5].tolist() == [0, 1, 2, 3, 4] and len(again) == 5


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(OSError, match=r"use the path of a folder, not .*taken"):
        fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "taken"))).init({"t": 0})
