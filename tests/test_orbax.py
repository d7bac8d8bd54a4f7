"""A buffer as an item of an orbax CheckpointManager: saved as of `save`, restored bit for bit, never cast."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _files
from tests.support.threads import PATIENCE

ocp = pytest.importorskip("orbax.checkpoint")
replay = pytest.importorskip("fbuf.orbax")

BUFFERS = {
    "device": fbuf.prioritized(40, normalize=None),
    "compressed": fbuf.Buffer(40, storage=fbuf.storages.Compressed(keys=("obs",))),
}
ROW = {"obs": jnp.zeros((4, 4), jnp.uint8), "reward": jnp.float32(0)}


def rows(step: int, n: int = 15) -> dict:
    t = np.arange(n) + step * n
    return {
        "obs": np.broadcast_to((t % 251).astype(np.uint8)[:, None, None], (n, 4, 4)),
        "reward": t.astype(np.float32),
    }


def save(manager, step: int, buffer, state, **settings) -> None:
    train = ocp.args.StandardSave({"w": jnp.full(3, step, jnp.float32)})
    manager.save(step, args=ocp.args.Composite(train=train, replay=replay.SaveArgs(buffer, state, **settings)))


def restore(manager, step: int, **settings):
    train = ocp.args.StandardRestore({"w": jnp.zeros(3)})
    return manager.restore(step, args=ocp.args.Composite(train=train, replay=replay.RestoreArgs(**settings)))


def same(buffer, one, other) -> None:
    for seed in range(3):
        batches = (buffer.peek(state, jax.random.key(seed), 16) for state in (one, other))
        first, second = (jax.tree.leaves((b.data, b.index.slot, b.probability)) for b in batches)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def check_manager(manager, name: str) -> None:
    """Three saves next to the train state; the last and an older one are restored, and one is resized."""
    buffer = BUFFERS[name]
    state = buffer.init(ROW)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    kept = {}
    for step in range(3):
        state = extend(state, rows(step))
        if name == "device":
            state = buffer.update_priority(state, buffer.last(state, 5).index, jnp.arange(5.0))
        save(manager, step, buffer, state)
        kept[step] = np.asarray(buffer.last(state, 15).data["reward"])
    manager.wait_until_finished()
    restored = restore(manager, 2)
    again, loaded = restored.replay
    assert again == buffer and restored.train["w"].tolist() == [2, 2, 2]
    same(buffer, state, loaded)
    same(buffer, extend(state, rows(7)), extend(loaded, rows(7)))
    _, older = restore(manager, 1, buffer=buffer).replay
    assert np.array_equal(buffer.last(older, 15).data["reward"], kept[1])
    assert manager.item_metadata(2).replay["rows"]["leaves"]
    larger, loaded = restore(manager, 2, resize=80).replay
    assert larger.capacity == 80 and int(larger.size(loaded)) == 40


@pytest.fixture(autouse=True)
def finalized() -> Iterator[None]:
    """Collect the coroutines of a failed save here, so that they do not warn in another test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def manager(request, tmp_path):
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=request.param)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        yield manager


def test_a_buffer_next_to_the_train_state(manager):
    check_manager(manager, "compressed")


def test_later_writes_are_not_in_an_asynchronous_save(tmp_path, monkeypatch):
    """The thread waits until the state was donated and all its rows overwritten, on the host too."""
    buffer = BUFFERS["compressed"]
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state = extend(extend(buffer.init(ROW), rows(0)), rows(1))
    wanted = np.asarray(buffer.last(state, 30).data["obs"])
    overwritten, write = threading.Event(), _files.write

    def late(*args, **kwargs):
        assert overwritten.wait(PATIENCE)
        return write(*args, **kwargs)

    monkeypatch.setattr(_files, "write", late)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        save(manager, 0, buffer, state)
        for step in range(2, 20):
            state = extend(state, rows(step))
        jax.block_until_ready(state)
        overwritten.set()
        manager.wait_until_finished()
        _, loaded = restore(manager, 0).replay
    assert np.array_equal(buffer.last(loaded, 30).data["obs"], wanted)


def test_an_error_of_the_thread_is_raised(tmp_path, monkeypatch):
    buffer = fbuf.Buffer(4)
    state = buffer.init({"x": 0.0})
    manager = ocp.CheckpointManager(tmp_path / "run")
    save(manager, 0, buffer, state)
    manager.wait_until_finished()

    def full(*args, **kwargs):
        time.sleep(0.5)  # an earlier failure lets orbax's other threads wait minutes for their folders
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_files, "write", full)
        with pytest.raises(OSError, match="No space left"):
            save(manager, 1, buffer, state)
            manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [0] and int(buffer.size(restore(manager, 0).replay[1])) == 0


def test_a_flipped_bit_is_an_error(tmp_path):
    """At each of 40 places of the rows; orbax itself misses most of these."""
    buffer, state = fbuf.interop.from_arrays({"x": np.arange(2**14, dtype=np.float32)})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        save(manager, 0, buffer, state)
        manager.wait_until_finished()
        (path,) = (tmp_path / "run" / "0" / "replay").glob("data-*.safetensors")
        whole = path.read_bytes()
        for at in np.linspace(0, len(whole) - 1, 40).astype(int):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            with pytest.raises(fbuf.StoreCorrupted):
                restore(manager, 0)
        path.write_bytes(whole)
        restore(manager, 0)


def test_other_dtypes_and_shapes_are_refused(tmp_path):
    buffer, state = fbuf.interop.from_arrays({"x": np.arange(3, dtype=np.float32)})
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        save(manager, 0, buffer, state)
        manager.wait_until_finished()
        for wrong in ({"x": jnp.int8(0)}, {"x": jnp.zeros(2)}, {"y": jnp.float32(0)}):
            with pytest.raises(fbuf.SchemaError):
                restore(manager, 0, example=wrong)
        with pytest.raises(fbuf.SchemaError):
            restore(manager, 0, buffer=fbuf.Buffer(4))


def test_invalid_arguments_are_refused(tmp_path):
    buffer = fbuf.Buffer(4)
    for wrong, state in ((buffer, {"x": 0}), (None, buffer.init({"x": 0}))):
        with pytest.raises(TypeError, match="expected a Buffer"):
            replay.SaveArgs(wrong, state)  # before orbax writes other items
    with pytest.raises(TypeError, match="expected SaveArgs"):
        replay.ReplayHandler().save(tmp_path, args=replay.RestoreArgs())


def test_a_missing_orbax_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "fbuf.orbax")
    for name in ("orbax", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'fbuf.orbax: orbax is missing .*pip install "fbuf\[orbax\]"'):
        importlib.import_module("fbuf.orbax")
