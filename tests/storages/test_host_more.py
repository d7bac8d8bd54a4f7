"""Buffers on the host: controls of the order, threads, gradients, memory, processes; see `tests/storages/test_host.py`."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._buffer import priorities, read, write
from fbuf.samplers import Prioritized
from fbuf.storages import _host_rows
from fbuf.testing import assert_inplace
from tests.storages import test_host as quick
from tests.support import ownership as _support
from tests.support.host import order_of_writes, overtaken
from tests.support.inplace import BATCH, CAPACITY, LANES, ROW, STEPS, VIEWS, inputs, shape
from tests.support.ownership import agree, filled, make, rows_of
from tests.support.processes import devices, run_python
from tests.support.tables import one_of, select_tests
from tests.support.threads import Thread

pytestmark = pytest.mark.more

storage = _support.storage


form = one_of("eager", "donated")
calls = one_of("eager", "jit", "donated")
globals().update(select_tests(quick, "form", "calls"))


@pytest.fixture
def untied(monkeypatch):
    """Verbs traced now do not order reads before writes."""
    methods = (read.sample, write.extend)
    for module in (read, priorities):
        monkeypatch.setattr(module, "order_after_reads", lambda token, reads: (token, reads))
    for verb in methods:
        verb._jitted.clear_cache()
    yield
    for verb in methods:
        verb._jitted.clear_cache()


def test_without_the_token_a_write_does(storage, untied):
    """The negative control of the order (separate dispatches run one after another on CPU anyway)."""
    assert overtaken(storage, "jit")


@pytest.mark.parametrize(("verbs", "want"), [("re", [*range(8, 14), 100, 101]), ("er", [*range(100, 108)])])
def test_changes_and_writes_of_one_jit_keep_their_order(verbs, want, monkeypatch):
    calls, rows = order_of_writes("host", monkeypatch, verbs, 16)
    assert calls[1::2] == ["1000", "2000"]
    first = agree(rows)
    expected = [*want, *range(200, 208)] if verbs == "re" else [*range(8, 14), 200, 201, *want]
    np.testing.assert_array_equal(first, expected)


def test_without_the_ticket_table_writes_change_places(monkeypatch):
    """The negative control: the store expires rows of the newest state."""
    monkeypatch.setattr(_host_rows, "_after", lambda rows: jnp.zeros((1, 2), jnp.uint32))
    calls, _ = order_of_writes("host", monkeypatch, "ee", 18)
    assert calls == ["write", "2000", "write", "1000"]


def test_readers_beside_a_writer(storage):
    """Slack of a few writes lets readers use the state of a moment ago."""
    buffer = make(storage, 32, 2, slack=4000, on_expired="mask")
    latest, done, read = [filled(buffer)], threading.Event(), [0, 0]

    def writer():
        try:
            for i in range(100):
                latest[0] = buffer.extend(latest[0], rows_of(32 + 8 * i, 4, 2))
            jax.block_until_ready(latest[0])
        finally:
            done.set()

    def reader(me):
        key = jax.random.key(me)
        while not done.is_set() or not read[me]:
            key, now = jax.random.split(key)
            batch = buffer.peek(latest[0], now, 16)
            assert agree(batch).size == 16
            read[me] += 1

    for thread in [Thread(writer), Thread(reader, 0), Thread(reader, 1)]:
        thread.ends()
    assert min(read) > 0
    np.testing.assert_array_equal(agree(buffer.rows(latest[0])), np.arange(800, 832))


def test_gradients_do_not_flow_into_the_store():
    buffer = fbuf.Buffer(capacity=4, storage=fbuf.storages.Host())
    state = buffer.init(jnp.zeros(2))

    def through(x):
        after = buffer.extend(state, jnp.stack([x, x]))
        return jnp.sum(buffer.peek(after, jax.random.key(0), 3).data + x[None])

    np.testing.assert_array_equal(jax.jit(jax.grad(through))(jnp.ones(2)), [3.0, 3.0])


sampler = one_of(Prioritized(on="host", normalize="buffer"))


@pytest.mark.in_place
def test_the_device_part_stays_in_place(sampler):
    """Whatever is written after it is read; tickets, flags and tree each exceed the bound."""
    rows = fbuf.storages.Compressed(keys=("obs",))
    buffer = fbuf.Buffer(CAPACITY, lanes=LANES, storage=rows, sampler=sampler, view=VIEWS["transition"])

    def step(state, given):
        stats = buffer.stats(state)
        state, batch = buffer.sample(state, given["key"], BATCH)
        state = buffer.update_rows(state, batch.index, {"obs": given["obs"], "reward": given["reward"]})
        state = buffer.extend(state, given["rows"])
        return buffer.update_priority(state, batch.index, batch.weight), (stats, batch)

    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), buffer.init(ROW))
    given = inputs((STEPS,)) | {"obs": shape((STEPS, BATCH, 4, 3), jnp.uint8)}
    memory = assert_inplace(lambda s, g: lax.scan(step, s, g), state, given)
    for leaf in jax.tree.leaves(state):
        size = leaf.size * leaf.dtype.itemsize
        assert size < 4096 or size > memory.bound, f"a copy of {leaf} would go unnoticed"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_core_and_a_pending_megabyte_do_not_hang():
    """`io_callback` waits for ever here: with one core nobody is left to copy its operand."""
    script = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, fbuf
from tests.support.ownership import late
for kind in (fbuf.storages.Host, fbuf.storages.Compressed):
    buffer = fbuf.Buffer(capacity=256, storage=kind(keys=("obs",)))
    state = buffer.init({"obs": jax.ShapeDtypeStruct((128, 128), jnp.uint8), "t": jnp.zeros((), jnp.int32)})
    for i in range(3):
        rows = late({"obs": jnp.full((128, 128, 128), i, jnp.uint8), "t": jnp.full((128,), i, jnp.int32)})
        state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, jax.random.key(i), 64)
    assert bool(jnp.all(batch.data["obs"] == batch.data["t"][:, None, None].astype(jnp.uint8)))
print("done")
"""
    assert run_python(script).stdout.strip() == "done"


def test_any_one_device_is_served_and_several_are_refused(storage):
    script = """
import re, sys, jax, numpy as np, fbuf
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.support.ownership import agree, filled, make, rows_of, store_of
from tests.support.refusals import raises
devices, put, key = jax.devices(), jax.device_put, jax.random.key(0)
assert len(devices) == 4
mesh = Mesh(np.array(devices), ("d",))
sharded, everywhere = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

buffer = make(sys.argv[1], 16, slack=0)
step = jax.jit(lambda s, k, r: buffer.sample(buffer.extend(s, r), k, 8), donate_argnums=0)
state, batch = step(put(filled(buffer), devices[3]), *put((key, rows_of(16, 8)), devices[3]))
state = buffer.extend(state, put(rows_of(24, 8), devices[3]))
assert batch.data["obs"].devices() == {devices[3]} == state.rows.ticket.devices()
assert np.isin(agree(batch), np.arange(8, 24)).all() and batch.mask.all()
assert agree(buffer.rows(state)).tolist() == list(range(16, 32))
with jax.default_device(devices[2]):
    own = filled(buffer)
    assert own.rows.ticket.devices() == {devices[2]}
    assert agree(buffer.rows(own)).tolist() == list(range(16))

host = fbuf.prioritized(16, on="host")
state = jax.jit(host.extend)(put(host.init({"x": 0}), devices[1]), put({"x": np.arange(16)}, devices[1]))
state, batch = host.sample(state, put(key, devices[1]), 4)
assert batch.mask.all() and batch.data["x"].devices() == {devices[1]} == state.sampler.tree.version.devices()

plain, other = filled(buffer), host.init({"x": 0})
here = "jax.device_put(x, jax.devices()[0])"
for f in (buffer.extend, jax.jit(buffer.extend)):
    for said, call in (
        (here, lambda: f(plain, put(rows_of(16, 8), sharded))),
        (here, lambda: f(plain, put(rows_of(16, 8), everywhere))),
        (here, lambda: f(put(plain, everywhere), rows_of(16, 8))),
        (here, lambda: buffer.sample(put(plain, everywhere), key, 4)),
        ('samplers.Prioritized(on="device")', lambda: host.extend(put(other, everywhere), {"x": np.arange(16)})),
        ('samplers.Prioritized(on="device")', lambda: host.sample(put(other, everywhere), key, 4)),
    ):
        raises(ValueError, "serves one device, but this computation spans 4.*" + re.escape(said), call)
assert agree(buffer.rows(plain)).tolist() == list(range(16))
print("done")
"""
    done = run_python(script, storage, **devices(4))
    assert done.stdout.strip() == "done"
