"""A buffer as an item of an orbax CheckpointManager: saved as of `save`, restored bit for bit, never cast."""

from __future__ import annotations

import importlib
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _files
from tests.support.orbax import BUFFERS, ROW, check_manager, finalized, manager, ocp, replay, restore, rows, save
from tests.support.threads import PATIENCE

__all__ = ["finalized", "manager"]  # fixtures


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
