"""`storages.Ragged`: who keeps rows alive, memory, growth, and batches like those of `Device`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Ragged
from fbuf.testing import assert_inplace
from fbuf.views import Row, Sequence
from tests.support.ownership import store_of
from tests.support.ragged import Thing


@pytest.mark.optimized
@pytest.mark.parametrize("view", [Row(), Sequence(3)])
def test_a_donated_step_copies_nothing(view: Any) -> None:
    buffer = fbuf.Buffer(capacity=200_000, storage=Ragged(maximum={"obs": 4}), sampler=Prioritized(), view=view)
    ends = {"terminated": False, "truncated": False}
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "x": 0.0, **ends})
    rows = {"obs": jnp.ones((3, 3)), "x": jnp.ones(3), **{name: jnp.zeros(3, bool) for name in ends}}

    def step(state: Any, given: Any) -> Any:
        rows, key = given
        state, one = buffer.sample(state, key, 8)
        state, two = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, one.index, two.weight), (one, two)

    memory = assert_inplace(step, state, (rows, jax.random.key(0)))
    for leaf in jax.tree.leaves(state):
        assert leaf.nbytes < 1024 or leaf.nbytes > memory.bound, f"a copy of {leaf.shape} would go unnoticed"


@pytest.mark.parametrize(("sampler", "lanes"), [(Prioritized(), None), (Epoch(), 2)])
def test_batches_are_those_of_device(sampler: Any, lanes: int | None) -> None:
    """The same batch as `Device` of what is dense, and ragged leaves of the same rows."""
    number = lanes or 1
    ragged = fbuf.Buffer(capacity=6 * number, lanes=lanes, storage=Ragged(), sampler=sampler)
    device = fbuf.Buffer(capacity=6 * number, lanes=lanes, sampler=sampler)
    one, two = ragged.init({"id": 0, "text": ""}), device.init({"id": 0})
    for i in range(5):
        ids = np.arange(4 * i * number, 4 * (i + 1) * number, dtype=np.int32).reshape(4, number)
        ids = ids if lanes else ids[:, 0]
        one = ragged.extend(one, {"id": ids, "text": jax.tree.map(str, ids.tolist())})
        two = device.extend(two, {"id": ids})
        one, batch = ragged.sample(one, jax.random.key(i), 8)
        two, other = device.sample(two, jax.random.key(i), 8)
        assert batch.lazy["text"] == [
            str(int(n)) if m else None for n, m in zip(batch.data["id"], batch.mask, strict=True)
        ]
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(batch), strict=False):
            assert a.dtype == b.dtype and (a == b).all()
        if sampler.prioritized:
            one = ragged.update_priority(one, batch.index, batch.data["id"].astype(jnp.float32))
            two = device.update_priority(two, batch.index, batch.data["id"].astype(jnp.float32))
    assert [x for x in jax.tree.leaves(ragged.rows(one).lazy["text"])] == [
        str(int(n)) for n in device.rows(two).data["id"].reshape(-1)
    ]


def test_padded_reads_of_expired_rows() -> None:
    example = {"obs": np.zeros(0, np.float32), "x": 0.0}
    rows = [{"obs": np.full(2, i, np.float32), "x": 1.0} for i in range(8)]
    for on_expired in ("raise", "mask"):
        buffer = fbuf.Buffer(capacity=4, storage=Ragged(maximum={"obs": 2}, slack=0, on_expired=on_expired))
        old = buffer.extend(buffer.init(example), rows[:4])
        buffer.extend(old, rows[4:6])
        if on_expired == "raise":
            with pytest.raises(Exception, match="2 of 4|4 of 8|rows have expired"):
                jax.block_until_ready(buffer.rows(old))
        else:
            got = buffer.rows(old)
            assert got.mask.tolist() == [False, False, True, True]
            assert got.data["obs"].tolist() == [[0, 0], [0, 0], [2, 2], [3, 3]]
            assert got.lazy.rows()[0] is None


def test_a_batch_keeps_its_store_and_objects_go_with_their_rows() -> None:
    buffer = fbuf.Buffer(capacity=2, storage=Ragged(slack=0))
    state = buffer.init({"x": None})
    thing = Thing()
    alive = weakref.ref(thing)
    state = buffer.add(state, {"x": thing})
    assert buffer.rows(state).lazy["x"][0] is thing
    state, batch = buffer.sample(state, jax.random.key(0), 2)
    stores = len(fbuf.stores())
    kept = state
    del state, kept
    gc.collect()
    assert len(fbuf.stores()) == stores and batch.lazy["x"] == [thing, thing]
    copied = jax.device_get(batch)
    del batch
    gc.collect()
    assert copied.lazy["x"][0] is thing
    del copied
    gc.collect()
    assert len(fbuf.stores()) == stores - 1
    state = buffer.extend(buffer.init({"x": None}), [{"x": thing}, {"x": 1}])
    del thing
    gc.collect()
    assert alive() is not None
    state = buffer.extend(state, [{"x": 2}, {"x": 3}])
    gc.collect()
    assert alive() is None


def test_memory_does_not_grow() -> None:
    buffer = fbuf.Buffer(capacity=64, lanes=2, storage=Ragged())
    state = buffer.init({"a": b"", "b": None})
    rng = np.random.default_rng(0)
    sizes = []
    for i in range(120):
        rows = [[{"a": bytes(int(rng.integers(1, 4000))), "b": Thing()} for _ in range(2)] for _ in range(8)]
        state = buffer.extend(state, rows, mask=rng.random((8, 2)) < (0.9, 0.1))  # a lane that stalls
        if i >= 30:
            sizes.append(store_of(state).nbytes)
    assert max(sizes) < 2 * np.mean(sizes[:20])
    stats = store_of(state).stats()
    assert stats["objects"] <= stats["rows_live"] and len(store_of(state)._shelves[1].objects) == stats["objects"]


def test_a_batch_can_be_cut_joined_and_scanned() -> None:
    buffer = fbuf.Buffer(10, storage=Ragged())
    state = buffer.init({"text": "", "r": 0.0})
    state = buffer.extend(state, [{"text": str(i), "r": float(i)} for i in range(7)])
    keys = jax.random.split(jax.random.key(0), 3)
    state, batches = jax.lax.scan(lambda s, k: buffer.sample(s, k, 4), state, keys)
    del state
    other = buffer.add(buffer.init({"text": "", "r": 0.0}), {"text": "q", "r": 0.0})  # takes the next store's place
    for cut in (batches, jax.tree.map(lambda x: x[1, ::-1], batches), jax.tree.map(lambda x: x[:, 1:3], batches)):
        texts = np.array(cut.lazy["text"], object).reshape(-1).tolist()
        assert [float(t) for t in texts] == np.asarray(cut.data["r"]).reshape(-1).tolist()
    totals = jax.vmap(lambda batch: batch.data["r"].sum())(batches)
    np.testing.assert_allclose(totals, batches.data["r"].sum(axis=1))
    assert np.asarray(other.ring.size) == 1
