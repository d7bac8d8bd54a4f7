"""Buffers whose rows lie in files, through JAX: `Memmap`, `Compressed(path=...)` and `Buffer.resume`."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Device, Host, Memmap
from tests.support.memmap import EXAMPLE, PLAIN, TRANSITION, make, rows_of
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import same

storage = one_of("memmap")  # `Compressed(path=...)` is in the other tiers
way = one_of(("memmap", TRANSITION, Prioritized(), 2, 33))  # storage, view, sampler, lanes, and rows written


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


def test_masked_lanes_and_changed_rows_come_back(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path, 20, **PLAIN)
    state = buffer.init(EXAMPLE)
    rng = np.random.default_rng(0)
    for i in range(9):
        state = buffer.extend(state, rows_of(5 * i, 5, 2), mask=rng.random((5, 2)) < [0.9, 0.3])
    index = jax.tree.map(lambda x: x.reshape(-1), buffer.last(state, 4).index)
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
    assert (np.asarray(buffer.last(state, 2).data["action"]) == [[200, 201], [202, 203]]).all()


def test_a_path_that_holds_a_store_names_resume(storage: str, tmp_path: Path) -> None:
    buffer = make(storage, tmp_path, **PLAIN)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5, 2))
    for verb in (buffer.init, buffer.resume):
        raises(BlockingIOError, "in use by this process; expected no other user. Drop every state", verb, EXAMPLE)
    del state
    pytest.raises(FileExistsError, buffer.init, EXAMPLE).match(r"has a store\. Use buffer.resume\(example\)")
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
