"""`storages.Ragged` against torchrl's example, in any form, in threads, windows and scans, and its memory."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Ragged
from fbuf.testing import assert_inplace
from fbuf.views import Sequence
from tests.support.ownership import store_of
from tests.support.ragged import Thing
from tests.support.tables import one_of
from tests.support.threads import Thread

pytestmark = pytest.mark.more


def test_readers_and_writers_in_threads():
    buffer = fbuf.Buffer(capacity=64, storage=Ragged())
    state = buffer.init({"a": b""})
    store, wrong = store_of(state), list[str]()

    def write():
        for i in range(150):
            store.put([[bytes([i % 250]) * (40 * i) for _ in range(4)]], 4, None)

    def read():
        for _ in range(300):
            newest = store.stats()["rows_accepted"]
            tickets = np.arange(max(newest - 30, 0), newest, dtype=np.uint64) + np.uint64(1)
            found, there = store.values(0, tickets)
            for ticket, value, ok in zip(tickets.tolist(), found, there, strict=True):
                i = (ticket - 1) // 4 % 150
                if ok and value != bytes([i % 250]) * (40 * i):
                    wrong.append(f"{ticket}")

    for thread in [Thread(write), Thread(read), Thread(read)]:
        thread.ends()
    assert not wrong and store.stats()["rows_accepted"] == 600


view = one_of(Sequence(3, autoreset="same_step"))


@pytest.mark.in_place
def test_a_donated_step_copies_nothing(view):
    buffer = fbuf.Buffer(capacity=200_000, storage=Ragged(maximum={"obs": 4}), sampler=Prioritized(), view=view)
    ends = {"terminated": False, "truncated": False}
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "x": 0.0, **ends})
    rows = {"obs": jnp.ones((3, 3)), "x": jnp.ones(3), **{name: jnp.zeros(3, bool) for name in ends}}

    def step(state, given):
        rows, key = given
        state, one = buffer.sample(state, key, 8)
        state, two = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, one.index, two.weight), (one, two)

    memory = assert_inplace(step, state, (rows, jax.random.key(0)))
    for leaf in jax.tree.leaves(state):
        assert leaf.nbytes < 1024 or leaf.nbytes > memory.bound, f"a copy of {leaf.shape} would go unnoticed"


def test_padded_reads_of_expired_rows():
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


def test_a_batch_keeps_its_store_and_objects_go_with_their_rows():
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


def test_a_batch_can_be_cut_joined_and_scanned():
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
