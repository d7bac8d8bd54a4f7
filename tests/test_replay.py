"""`Replay`: the same batches as the functional buffer, in place, and errors for values."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf

STORAGES = [
    fbuf.storages.Device(),
    fbuf.storages.Host(keys=("obs",)),
    fbuf.storages.Compressed(keys=("obs",)),
    fbuf.storages.Deduplicated(keys=("obs",), blocks=256),
]
EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "reward": np.float32(0)}


def rows(start: int, count: int) -> dict[str, Any]:
    number = np.arange(start, start + count)
    obs = np.broadcast_to((number % 256).astype(np.uint8)[:, None, None], (count, 8, 8))
    return {"obs": np.ascontiguousarray(obs), "reward": number.astype(np.float32)}


def make(storage: Any = STORAGES[0], capacity: int = 64, **settings: Any) -> fbuf.Replay:
    return fbuf.Replay(fbuf.prioritized(capacity, storage=storage), EXAMPLE, seed=3, **settings)


@pytest.mark.parametrize("storage", STORAGES)
def test_same_batches_as_the_buffer(storage: Any) -> None:
    replay, buffer = make(storage), fbuf.prioritized(64, storage=storage)
    state, key = buffer.init(EXAMPLE), jax.random.key(3)
    for start in range(0, 100, 20):
        replay.extend(rows(start, 20))
        state = buffer.extend(state, rows(start, 20))
        key, draw = jax.random.split(key)
        batch = replay.sample(8, beta=0.7)
        state, expected = buffer.sample(state, draw, 8, beta=0.7)
        jax.tree.map(np.testing.assert_array_equal, batch, expected)
        replay.update_priority(batch.index, batch.data["reward"])
        state = buffer.update_priority(state, expected.index, expected.data["reward"])
    assert len(replay) == 64
    replay.add({"obs": np.full((8, 8), 7, np.uint8), "reward": 1.0})
    assert np.asarray(replay.last(1).data["obs"])[0, 0, 0] == 7


def test_writes_are_in_place() -> None:
    replay = make(capacity=4096)
    before = replay.state.rows["obs"].unsafe_buffer_pointer()
    old = replay.state
    replay.extend(rows(0, 8))
    assert replay.state.rows["obs"].unsafe_buffer_pointer() == before
    assert old.rows["obs"].is_deleted()


def test_nothing_to_draw() -> None:
    replay = make()
    with pytest.raises(ValueError, match=r"Replay.sample: there is nothing to draw now. Ask can_sample first"):
        replay.sample(4)
    assert not replay.can_sample()
    replay.extend(rows(0, 4))
    assert replay.can_sample() and replay.sample(4).mask.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(bad: float) -> None:
    replay = make()
    replay.extend(rows(0, 10))
    batch = replay.sample(4)
    error = np.ones(4, np.float32)
    error[1] = bad
    with pytest.raises(ValueError, match="1 nonfinite; the others took effect"):
        replay.update_priority(batch.index, error)
    assert replay.sample(4).mask.all()
    replay.update_priority(batch.index, np.ones(4, np.float32))  # counted once, not again


def test_stale_and_out_of_range() -> None:
    replay = make(capacity=16)
    replay.extend(rows(0, 16))
    batch = replay.sample(4)
    replay.extend(rows(16, 16))
    with pytest.raises(ValueError, match="4 stale"):
        replay.update_priority(batch.index, np.ones(4, np.float32))
    wild = fbuf.Index(jnp.array([99, -5], jnp.int32), jnp.ones(2, jnp.uint32))
    with pytest.raises(ValueError, match="2 out of range"):
        replay.update_priority(wild, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="4 stale"):
        replay.update_rows(batch.index, {"reward": np.ones(4, np.float32)})


def test_unwritten_rows() -> None:
    replay = make(capacity=16)
    replay.extend(rows(0, 4))
    unwritten = fbuf.Index(jnp.array([10], jnp.int32), jnp.ones(1, jnp.uint32))
    with pytest.raises(ValueError, match="1 stale"):
        replay.update_priority(unwritten, np.ones(1, np.float32))


def test_not_strict_only_counts() -> None:
    replay = make(strict=False)
    assert not replay.sample(4).mask.any()
    replay.extend(rows(0, 10), priority=np.array([np.nan] + [1.0] * 9, np.float32))
    stats = replay.stats()
    assert stats["empty_samples"] == 1 and stats["refused_nonfinite"] == 1


def test_priority_given_is_checked() -> None:
    replay = make()
    with pytest.raises(ValueError, match="Replay.extend: refused one by one: 1 nonfinite"):
        replay.extend(rows(0, 2), priority=np.array([np.inf, 1.0], np.float32))
    assert len(replay) == 2


@pytest.mark.parametrize("form", ["jax", "numpy", "torch"])
def test_forms(form: str) -> None:
    if form == "torch":
        pytest.importorskip("torch")
    replay = make()
    replay.extend(rows(0, 32))
    batch = replay.sample(8, to=form)
    kind = {"jax": jax.Array, "numpy": np.ndarray}.get(form)
    if kind is None:
        import torch

        kind = torch.Tensor
    assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(batch))
    replay.update_priority(batch.index, batch.data["reward"])
    assert replay.stats()["max_priority"] >= 1.0


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match='to is \'tf\'; expected "jax", "numpy" or "torch"'):
        make().sample(4, to="tf")


def test_torch_rows() -> None:
    torch = pytest.importorskip("torch")
    replay = make()
    replay.extend({"obs": torch.ones((5, 8, 8), dtype=torch.uint8), "reward": torch.arange(5.0)})
    assert len(replay) == 5 and np.asarray(replay.rows().data["reward"])[:5].tolist() == [0, 1, 2, 3, 4]


def test_the_rest() -> None:
    replay = make(capacity=16)
    replay.extend(rows(0, 8))
    batch = replay.sample(4)
    replay.update_rows(batch.index, {"reward": np.full(4, 99, np.float32)})
    assert (np.asarray(replay.get(batch.index).data["reward"]) == 99).all()
    replay.set(alpha=0.0)
    assert replay.stats()["alpha"] == 0
    assert replay.nbytes()["device"] > 0 and "8 rows" in repr(replay)
    replay.clear()
    assert len(replay) == 0


def test_a_seed_is_a_whole_number() -> None:
    buffer = fbuf.uniform(4)
    for wrong in ("x", 1.5, None, np.zeros(2, int), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"Replay: seed is [^;]*; expected an int\. Write Replay\(.*seed=0\)"):
            fbuf.Replay(buffer, 0, wrong)  # type: ignore[arg-type]
    for seed in (2, np.int64(2), jnp.int32(2)):
        replay = fbuf.Replay(buffer, 0, seed)  # type: ignore[arg-type]
        replay.extend(np.arange(4))
        assert len(replay) == 4


def test_presets() -> None:
    assert fbuf.uniform(10, lanes=2) == fbuf.Buffer(10, lanes=2)
    assert fbuf.prioritized(10, 0.5, eps=0.0).sampler == fbuf.samplers.Prioritized(alpha=0.5, eps=0.0)


def test_checked_raises_for_any_step() -> None:
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init(EXAMPLE), rows(0, 8))

    @jax.jit
    def learn(state: fbuf.BufferState, scale: jax.Array) -> fbuf.BufferState:
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        return buffer.update_priority(state, batch.index, batch.data["reward"] * scale)

    fine = fbuf.checked(learn)(state, jnp.float32(1))
    with pytest.raises(ValueError, match="checked: refused one by one: 4 nonfinite"):
        fbuf.checked(learn)(fine, jnp.float32(jnp.nan))
    with pytest.raises(ValueError, match="checked: there is nothing to draw now"):
        fbuf.checked(learn)(buffer.init(EXAMPLE), jnp.float32(1))


# ---------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize(
    ("storage", "prefetch"),
    [("compressed", 0), ("compressed", 1), ("memmap", 0)]
    + [pytest.param(s, n, marks=pytest.mark.slow) for s in ("device", "host") for n in (0, 1)]
    + [pytest.param("memmap", 1, marks=pytest.mark.slow)],
)
def test_threads_add_and_sample_at_once(storage: str, prefetch: int) -> None:
    made = {
        "device": fbuf.storages.Device(),
        "compressed": fbuf.storages.Compressed(keys=("obs",)),
        "host": fbuf.storages.Host(keys=("obs",)),
        "memmap": fbuf.storages.Memmap(keys=("obs",)),
    }
    buffer = fbuf.Buffer(
        200,
        storage=made[storage],
        sampler=fbuf.samplers.Prioritized(),
        prefetch=prefetch,
        batch_size=16 if prefetch else None,
    )
    example = {"obs": np.zeros((8, 9), np.int32), "thread": np.int32(0), "t": np.int32(0)}
    replay = fbuf.Replay(buffer, example)
    adders, writes, failures = 2, 60, []

    def rows(thread: int, start: int) -> dict[str, np.ndarray]:
        t = np.arange(start, start + 5, dtype=np.int32)
        obs = np.broadcast_to((thread * 100_000 + t)[:, None, None], (5, 8, 9))
        return {"obs": np.ascontiguousarray(obs), "thread": np.full(5, thread, np.int32), "t": t}

    replay.extend(rows(0, 0))

    def add(thread: int) -> None:
        for i in range(writes):
            replay.extend(rows(thread, 5 * (i + 1)))

    def draw(thread: int) -> None:
        for _ in range(writes):
            batch = replay.sample(16, to="numpy")
            data = batch.data
            assert batch.mask.all()
            np.testing.assert_array_equal(
                data["obs"], (data["thread"] * 100_000 + data["t"])[:, None, None] + 0 * data["obs"]
            )
            if thread:
                with contextlib.suppress(ValueError):  # another thread may have overwritten some of them
                    replay.update_priority(batch.index, np.abs(np.sin(data["t"])).astype(np.float32))

    def guarded(function: Any, thread: int) -> None:
        try:
            function(thread)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(f, i)) for f in (add, draw) for i in range(adders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures, failures[0]
    assert len(replay) == 200
    kept = jax.device_get(replay.rows().data)
    for thread in range(adders):  # each thread's rows in its own order, none lost among the newest
        own = kept["t"][kept["thread"] == thread]
        assert (np.diff(own) == 1).all()
