"""Buffers as items of an orbax CheckpointManager."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf

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
