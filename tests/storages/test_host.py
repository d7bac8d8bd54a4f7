"""Buffers whose rows lie on the host, through JAX: order, expiry, transformations, callbacks."""

import functools
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._bridge import callbacks
from fbuf._buffer import priorities, read, write
from fbuf._host.store.row_updates import RowUpdates
from fbuf._host.store.store import Store
from fbuf.samplers import Prioritized
from fbuf.storages import _host_rows, _host_storage
from fbuf.testing import assert_inplace
from tests.support import ownership as _support
from tests.support.host import history, order_of_writes, overtaken, use_other_callbacks
from tests.support.inplace import BATCH, CAPACITY, LANES, ROW, STEPS, VIEWS, inputs, shape
from tests.support.ownership import EXAMPLE, STORAGES, agree, filled, full, make, rows_of, store_of
from tests.support.processes import devices, run_python
from tests.support.refusals import raises, raises_late
from tests.support.store import Failing
from tests.support.tables import one_of
from tests.support.threads import Thread, handled
from tests.support.trees import same

storage = _support.storage


form = one_of("jit", more=["eager", "donated"])


def test_no_write_overtakes_a_late_read(storage: str, form: str) -> None:
    assert not overtaken(storage, form)


@pytest.mark.more
def test_writes_of_one_jit_reach_the_store_in_order(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, rows = order_of_writes(storage, monkeypatch, "ee", 16)
    assert calls == ["write", "1000", "write", "2000"]
    np.testing.assert_array_equal(agree(rows), [*range(100, 108), *range(200, 208)])


def test_an_old_state_reads_its_own_rows_then_raises(storage: str) -> None:
    buffer, old = full(storage, slack=5)
    state = buffer.extend(old, rows_of(8, 5))
    np.testing.assert_array_equal(agree(buffer.rows(old)), np.arange(8))
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(5, 13))
    state = buffer.add(state, jax.tree.map(lambda x: x[0], rows_of(13, 1)))
    raises_late(r"1 of 8 rows have expired.*Carry on the state", buffer.rows, old)
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(6, 14))


def test_an_old_state_can_mask_instead(storage: str) -> None:
    buffer, old = full(storage, slack=2, on_expired="mask")
    buffer.extend(old, rows_of(8, 6))
    kept = buffer.rows(old)
    np.testing.assert_array_equal(agree(kept), np.arange(4, 8))
    assert not np.asarray(kept.index.generation)[:4].any()
    after, batch = buffer.sample(old, jax.random.key(0), 64)
    assert set(agree(batch)) == {4, 5, 6, 7}
    lost = ~np.asarray(batch.mask)
    for array in (*jax.tree.leaves(batch.data), batch.probability, batch.weight, batch.index.generation):
        assert not np.asarray(array)[lost].any()
    assert (np.asarray(batch.index.slot)[lost] == 8).all()
    assert int(buffer.stats(after)["expired_rows"]) == lost.sum() > 0


def stacks(storage: Any) -> Any:
    """Return a buffer of windows of three rows, a state that is full, and its rows."""
    settings: Any = {"action": None, "reward": "t", "terminated": "end", "truncated": None, "autoreset": "same_step"}
    buffer = fbuf.Buffer(capacity=8, storage=storage, view=fbuf.views.Transition(stack=3, **settings))
    rows = rows_of(0, 8) | {"end": jnp.zeros(8, bool)}
    rows["t"] = rows["t"].astype(jnp.float32)
    return buffer, buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows), rows


def test_a_window_that_lost_a_row_is_masked_whole(storage: str) -> None:
    buffer, old, rows = stacks(STORAGES[storage](slack=2, on_expired="mask"))
    buffer.extend(old, rows)
    batch = buffer.peek(old, jax.random.key(0), 64)
    assert set(np.asarray(batch.data["reward"])[np.asarray(batch.mask)].astype(int)) <= {6, 7}
    assert not np.asarray(batch.data["obs"])[~np.asarray(batch.mask)].any()


def test_a_row_is_there_if_all_its_leaves_are(storage: str) -> None:
    buffer, old, rows = stacks(STORAGES[storage](keys=("obs", "t"), slack=5, on_expired="mask"))  # rows 3 to 7
    drawn = np.asarray(buffer.peek(old, jax.random.key(0), 64).data["reward"])
    buffer.extend(old, rows)
    there = np.asarray(buffer.peek(old, jax.random.key(0), 64).mask)
    np.testing.assert_array_equal(there, drawn >= 5)
    assert there.any() and not there.all()


def test_slack_is_rounded_up_to_whole_steps(storage: str) -> None:
    buffer = make(storage, lanes=2, slack=1, on_expired="mask")
    rows = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), rows_of(0, 10))
    old = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], rows)), jax.tree.map(lambda x: x[:4], rows))
    buffer.extend(old, jax.tree.map(lambda x: x[4:], rows))
    assert buffer.rows(old).mask.all()


@pytest.mark.more
def test_two_futures_of_one_state_never_read_each_others_rows(storage: str) -> None:
    buffer, root = full(storage, slack=64)
    left, right = root, root
    for i in range(3):
        left = buffer.extend(left, rows_of(100 + 3 * i, 3))
        right = buffer.extend(right, rows_of(200 + 3 * i, 3))
    np.testing.assert_array_equal(agree(buffer.rows(left)), np.arange(101, 109))
    np.testing.assert_array_equal(agree(buffer.rows(right)), np.arange(201, 209))
    np.testing.assert_array_equal(agree(buffer.rows(root)), np.arange(8))


def test_changed_rows_leave_the_old_state_alone(storage: str) -> None:
    buffer, old = full(storage, slack=0)
    index = buffer.get(old, jnp.array([1, 6, 1])).index
    state = buffer.update_rows(old, index, rows_of(40, 3))
    np.testing.assert_array_equal(agree(buffer.rows(state)), [0, 42, 2, 3, 4, 5, 41, 7])
    np.testing.assert_array_equal(agree(buffer.rows(old)), np.arange(8))
    np.testing.assert_array_equal(agree(buffer.get(state, index)), [42, 41, 42])  # the index still names the row
    state = buffer.extend(state, rows_of(8, 1))
    np.testing.assert_array_equal(agree(buffer.rows(state)), [42, 2, 3, 4, 5, 41, 7, 8])
    only = buffer.update_rows(state, buffer.rows(state, last=1).index, {"obs": rows_of(9, 1)["obs"]})
    last = buffer.rows(only, last=1)
    assert int(last.data["t"][0]) == 8 and int(last.data["obs"][0, 0]) == 90


lanes = one_of(3, exhaustive=[None])


@pytest.mark.more
def test_counters_cross_2_to_32(storage: str, lanes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (2**32 - 5) // (lanes or 1)
    monkeypatch.setattr(_host_storage, "Store", partial(Store, first_seq=first))
    buffer = make(storage, 12, lanes, slack=0)
    state = buffer.init(EXAMPLE)
    each = 12 // (lanes or 1)
    tickets: set[int] = set()
    for i in range(3):
        state = buffer.extend(state, rows_of(12 * i, each, lanes))
        np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(12 * i, 12 * i + 12))
        tickets |= {low + (high << 32) for low, high in np.asarray(state.rows.ticket).tolist()}
    assert len(tickets) == 36 and min(tickets) < 2**32 < max(tickets)
    state, batch = buffer.sample(state, jax.random.key(0), 32)
    assert agree(batch).size == 32
    state = buffer.update_rows(state, batch.index, {"t": batch.data["t"], "obs": batch.data["obs"]})
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(24, 36))


@functools.cache
def of_device() -> Any:
    return history(fbuf.Buffer(capacity=7), "scan")


calls = one_of("scan", more=["eager", "jit", "donated"])


def test_every_form_gives_the_batches_of_device(storage: str, calls: str) -> None:
    same(history(make(storage, 7), calls), of_device())


@pytest.mark.more
def test_what_cannot_be_vmapped_says_so(storage: str) -> None:
    buffer, state = full(storage)
    before, index = store_of(state).stats(), buffer.rows(state, last=2).index
    many, states = (jax.tree.map(lambda x: jnp.stack([x, x]), tree) for tree in (rows_of(0, 4), state))

    def extend(state: Any) -> Any:
        return buffer.extend(state, rows_of(0, 4))

    attempts: list[tuple[Any, Any]] = [
        (lambda rows: buffer.extend(state, rows), many),
        (lambda obs: buffer.update_rows(state, index, {"obs": obs}), np.zeros((2, 2, 6), np.int32)),
        (lambda state: buffer.sample(state, jax.random.key(0), 4), states),
        (extend, states),
        (buffer.rows, states),
    ]
    for method, given in attempts:
        for call in (jax.vmap(method), jax.jit(jax.vmap(method))):
            pytest.raises(TypeError, call, given).match(r"cannot be vmapped.*lanes=E.*storages\.Device\(\)")
    # JAX refuses a branch of a batched conditional by its effects, before it looks inside.
    maybe = jax.vmap(lambda go: lax.cond(go, extend, lambda s: s, state))
    pytest.raises(NotImplementedError, maybe, np.array([True, False])).match("IO effect not supported in vmap-of-cond")
    assert store_of(state).stats() == before


@pytest.mark.more
def test_peek_vmaps_over_keys(storage: str) -> None:
    buffer = make(storage)
    state, keys = filled(buffer), jax.random.split(jax.random.key(0), 5)
    many = jax.jit(jax.vmap(lambda k: buffer.peek(state, k, 4)))(keys)
    one = [buffer.peek(state, k, 4) for k in keys]
    same(many, jax.tree.map(lambda *x: jnp.stack(x), *one))


def test_every_dtype_and_shape_crosses_the_callback(storage: str) -> None:
    rng = np.random.default_rng(0)
    dtypes = "bool int8 uint16 int32 uint32 float16 bfloat16 float32 complex64 float8_e4m3fn".split()
    dtypes += "int2 int4 uint2 uint4 float4_e2m1fn".split()
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 1, 500)]
    leaves = [(dtype, shapes[i % 3]) for i, dtype in enumerate(dtypes)]
    leaves += [("int32", (0,)), ("bool", ()), ("uint32", ())]
    rows = {f"{i}": rng.integers(0, 2, (5, *x)).astype(jnp.dtype(dtype)) for i, (dtype, x) in enumerate(leaves)}
    buffer = fbuf.Buffer(capacity=5, storage=STORAGES[storage].func(keys=tuple(rows)))  # type: ignore[attr-defined]
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    got = jax.device_get(jax.jit(lambda s: buffer.rows(s))(state).data)
    for name, want in rows.items():
        assert got[name].dtype == want.dtype and got[name].shape == want.shape
        assert got[name].tobytes() == want.tobytes(), name


@pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2fn"])
def test_leaves_of_which_xla_takes_no_arrays_are_refused_by_init(dtype: str) -> None:
    leaf, ragged = np.zeros(2, dtype), fbuf.storages.Ragged(maximum={"x": (2,)})
    for storage in (fbuf.storages.Device(), ragged, *(part.func(keys=("x",)) for part in STORAGES.values())):  # type: ignore[attr-defined]
        buffer = fbuf.Buffer(4, storage=storage)
        raises(TypeError, f"Buffer.init: leaf 'x' is {dtype}, of which XLA takes no arrays", buffer.init, {"x": leaf})


def test_outputs_are_always_filled_and_inputs_never_written() -> None:
    """Straight into the callbacks, with outputs full of rubbish."""
    buffer = fbuf.Buffer(capacity=4, storage=fbuf.storages.Compressed(keys=("obs",), slack=0, on_expired="mask"))
    state = buffer.extend(filled(buffer), rows_of(4, 2))
    id, token, after = np.asarray(state.rows.id), np.zeros((), np.int32), np.zeros((1, 2), np.uint32)
    pairs = np.array([[0, 0], [1, 0], [6, 0], [7, 9], [5, 2**31]], np.uint32)  # none, expired, there, unknown twice
    rows, there = np.full((5, 6), 171, np.int32), np.frombuffer(b"\2" * 5, np.bool_).copy()
    callbacks._read_rows((0,), False, None, [rows, there], id, pairs)
    np.testing.assert_array_equal(rows[:, 0], [0, 0, 50, 0, 0])
    np.testing.assert_array_equal(there.view(np.uint8), [1, 0, 1, 0, 0])

    fresh = np.asarray(rows_of(6, 2)["obs"])[:, None].copy()
    out = np.full((2, 1, 2), 171, np.uint32)
    callbacks._write_rows(True, None, out, id, token, after, np.array([[False], [True]]), fresh)
    np.testing.assert_array_equal(out[:, 0], [[0, 0], [7, 0]])
    assert not fresh.flags.writeable  # the view that user codecs and the store get
    out = np.full((5, 2), 171, np.uint32)
    keep = np.array([True, True, True, True, False])
    callbacks._update_rows((0,), None, out, id, token, after, pairs, keep, np.zeros((5, 6), np.int32))
    np.testing.assert_array_equal(np.delete(out, 2, 0), np.delete(pairs, 2, 0))
    assert out[2, 1] == 2**31


@pytest.mark.parametrize("method", [RowUpdates.expire, Store.read])
def test_an_interrupt_waits_until_the_store_is_done(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=fbuf.storages.Host(keys=("obs",), slack=8))
    step = jax.jit(lambda state: (buffer.extend(state, rows_of(8, 4)), buffer.rows(state).data))
    state, owner, sent = filled(buffer), RowUpdates if method is RowUpdates.expire else Store, []
    before = jax.device_get(step(state))

    def interrupted(*args: Any, **options: Any) -> Any:
        sent.append(os.kill(os.getpid(), signal.SIGINT))
        return method(*args, **options)

    monkeypatch.setattr(owner, method.__name__, interrupted)
    began = time.monotonic()
    with handled(signal.SIGINT, signal.default_int_handler):
        raises(KeyboardInterrupt, None, lambda: (step(state), time.sleep(60)))
    monkeypatch.undo()
    assert sent and time.monotonic() - began < 30  # it wakes a thread that waits
    same(jax.device_get(step(state))[1], before[1])  # neither the store nor the state is lost


def test_an_interrupt_in_a_callback_of_an_eager_call_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Host(keys=("obs",)))
    state = filled(buffer)

    def raise_interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "read", raise_interrupt)
    raises(KeyboardInterrupt, None, buffer.sample, state, jax.random.key(0), 2)


def test_an_exception_in_a_codec_surfaces_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=8, storage=fbuf.storages.Compressed(keys=("obs",), codec=Failing(2), slack=0))
    state = filled(buffer)
    extend: Any = jax.jit(buffer.extend)
    before = store_of(state).stats()
    monkeypatch.setattr(Failing, "left", 0)
    raises(OSError, "full.*4 rows were not written", lambda: jax.block_until_ready(extend(state, rows_of(8, 4))))
    raises(OSError, "full", lambda: jax.block_until_ready(buffer.rows(state)))
    monkeypatch.undo()
    assert store_of(state).stats() == before
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(8))
    state = extend(state, rows_of(8, 4))
    np.testing.assert_array_equal(agree(buffer.rows(state)), np.arange(4, 12))


@pytest.mark.more
def test_the_callbacks_for_accelerators_agree(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = of_device()
    used = use_other_callbacks(monkeypatch)
    same(history(make(storage, 7, slack=17), "scan"), want)
    buffer, old = full(storage, 9, slack=1)
    keys = jax.random.split(jax.random.key(0), 3)
    assert agree(jax.vmap(lambda k: buffer.peek(old, k, 4))(keys)).size == 12
    with pytest.raises(TypeError, match="cannot be vmapped"):
        jax.vmap(lambda x: buffer.extend(old, rows_of(0, 3) | {"obs": x}))(jnp.zeros((2, 3, 6), jnp.int32))
    buffer.extend(old, rows_of(9, 9))
    raises_late("8 of 9 rows have expired", buffer.rows, old)
    assert set(used) == {"io_callback", "pure_callback"}


def test_the_platform_that_is_lowered_for_chooses_the_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make("compressed", 7, slack=19)

    def step(state: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows_of(8, 3)), jax.random.key(0), 4)
        return state, batch.data

    state = filled(buffer)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    traced = jax.jit(step).trace(state)
    lowered = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert lowered.count("@xla_buffer_python_cpu_callback") == 2
    assert "@xla_ffi_python_cpu_callback" not in lowered and "@xla_python_cpu_callback" not in lowered
    # Without a TPU or its compiler JAX lowers no io_callback for one; a buffer_callback would be refused in other words.
    with pytest.raises(Exception, match="platform|backend") as caught:
        traced.lower(lowering_platforms=("tpu",))
    assert "buffer_callback" not in str(caught.value)


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


@pytest.mark.more
def test_without_the_token_a_write_does(storage, untied):
    """The negative control of the order (separate dispatches run one after another on CPU anyway)."""
    assert overtaken(storage, "jit")


@pytest.mark.more
@pytest.mark.parametrize(("verbs", "want"), [("re", [*range(8, 14), 100, 101]), ("er", [*range(100, 108)])])
def test_changes_and_writes_of_one_jit_keep_their_order(verbs, want, monkeypatch):
    calls, rows = order_of_writes("host", monkeypatch, verbs, 16)
    assert calls[1::2] == ["1000", "2000"]
    first = agree(rows)
    expected = [*want, *range(200, 208)] if verbs == "re" else [*range(8, 14), 200, 201, *want]
    np.testing.assert_array_equal(first, expected)


@pytest.mark.more
def test_without_the_ticket_table_writes_change_places(monkeypatch):
    """The negative control: the store expires rows of the newest state."""
    monkeypatch.setattr(_host_rows, "last_write", lambda rows: jnp.zeros((1, 2), jnp.uint32))
    calls, _ = order_of_writes("host", monkeypatch, "ee", 18)
    assert calls == ["write", "2000", "write", "1000"]


@pytest.mark.more
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


@pytest.mark.more
def test_gradients_do_not_flow_into_the_store():
    buffer = fbuf.Buffer(capacity=4, storage=fbuf.storages.Host())
    state = buffer.init(jnp.zeros(2))

    def through(x):
        after = buffer.extend(state, jnp.stack([x, x]))
        return jnp.sum(buffer.peek(after, jax.random.key(0), 3).data + x[None])

    np.testing.assert_array_equal(jax.jit(jax.grad(through))(jnp.ones(2)), [3.0, 3.0])


sampler = one_of(Prioritized(on="host", normalize="buffer"), exhaustive=[Prioritized()])


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_core_and_a_pending_megabyte_do_not_hang():
    """With one core, no thread is left to copy the operand of an `io_callback`, which then never returns."""
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


@pytest.mark.more
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
