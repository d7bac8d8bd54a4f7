"""How long a host store lives, who may use it, and what is said to those who may not."""

import copy
import gc
import itertools
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._bridge import lifetime
from tests.support import ownership as _support
from tests.support.ownership import EXAMPLE, KEY, agree, filled, full, id_of, late, make, rows_of
from tests.support.processes import run_python
from tests.support.refusals import raises, raises_late
from tests.support.tables import by_tier
from tests.support.threads import PATIENCE, Thread

storage = _support.storage
NOT_OPEN = r"host store \([0-9a-f]{16}\) is not open in this process.*Keep the BufferState itself"


@pytest.fixture(autouse=True)
def nothing_left():
    gc.collect()
    assert fbuf.stores() == []
    yield
    for handle in fbuf.stores():
        handle.close()


def test_a_store_goes_with_its_last_state_without_the_garbage_collector(storage):
    buffer, state = full(storage)
    ref = weakref.ref(lifetime.find(id_of(state)))
    gc.disable()
    try:
        state = buffer.extend(state, rows_of(8, 3))
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        other = jax.tree.map(lambda x: x, state)
        jax.block_until_ready((state, batch))
        del state
        assert len(fbuf.stores()) == 1 and agree(buffer.rows(other)).size == 8
        del other
        assert fbuf.stores() == [] and ref() is None
    finally:
        gc.enable()


def test_a_store_that_raised_goes_too():
    buffer, state = full("host", slack=0)
    new = buffer.extend(state, rows_of(8, 8))
    raises_late("expired", buffer.rows, state)
    store = lifetime.find(id_of(state))
    raises(IndexError, None, store.write, [], None)
    assert store.last_error is not None
    ref = weakref.ref(store)
    del store, state, new
    gc.collect()  # what pytest.raises caught holds frames
    assert fbuf.stores() == [] and ref() is None


@pytest.mark.parametrize("then", ["listed", "unflattened", "opened"])
def test_nothing_of_jax_runs_during_a_collection(storage, then, monkeypatch):
    """A collection may start while JAX takes a traceback, which is not reentrant."""
    (_, other), (_, state), looked = full("host"), full(storage), []
    ref = weakref.ref(lifetime.find(id_of(state)))

    def live_arrays(*args, found=jax.live_arrays):
        looked.append(args)
        return found(*args)

    monkeypatch.setattr(jax, "live_arrays", live_arrays)
    cycle = [jax.block_until_ready(state)]
    cycle.append(cycle)
    del cycle, state
    gc.collect()
    assert not looked and ref() is not None
    match then:  # each looks after it
        case "listed":
            fbuf.stores()
        case "unflattened":
            jax.tree.map(lambda x: x, other)
        case "opened":
            full("host")
    assert looked and ref() is None


OPEN = threading.Event()


def _wait(zero):
    assert OPEN.wait(PATIENCE)
    return np.zeros((), np.int32)


@jax.jit
def _behind(x, slow):
    zero = jax.pure_callback(_wait, jax.ShapeDtypeStruct((), jnp.int32), slow[0])
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), x)


def behind(x):
    slow = late(late(np.zeros(1, np.int32)))
    if slow.is_ready() and not OPEN.is_set() and jax.__version_info__ < (0, 10):
        pytest.skip("old jax runs things in the calling thread once a computation has failed: nothing is late")
    return _behind(x, slow)


@pytest.fixture
def gate():
    OPEN.set()
    # Compiled now, so that `slow` is not done before its turn.
    jax.block_until_ready(_behind(KEY, jnp.zeros(1, jnp.int32)))
    OPEN.clear()
    yield OPEN
    OPEN.set()


def double(data):
    return jax.tree.map(lambda x: x + x, data)


USES = {"read": lambda data: data, "computed": jax.jit(double), "donated": jax.jit(double, donate_argnums=0)}


def read_and_drop(storage, use="read"):
    buffer, state = full(storage)
    jax.block_until_ready(USES[use](buffer.sample(state, KEY, 16)[1].data))  # compiles
    key = behind(KEY)
    state, batch = buffer.sample(state, key, 16)
    assert not key.is_ready()
    del state, key
    gc.collect()
    return USES[use](batch.data)


@pytest.mark.parametrize(("use", "sweeps"), by_tier(("read", 0), more=[("read", 3), ("computed", 3), ("donated", 1)]))
def test_what_was_made_of_a_pending_read_outlives_every_state(storage, use, sweeps, gate):
    data = read_and_drop(storage, use)
    for _ in range(sweeps):
        waiting = [store.waiting for store in fbuf.stores()]
        assert waiting == [True] or (use == "donated" and data["obs"].is_ready())  # jax 0.7 waits before it donates
    gate.set()
    columns = np.arange(6) * (1 if use == "read" else 2)
    np.testing.assert_array_equal(data["obs"], 10 * np.asarray(data["t"])[:, None] + columns)
    assert data["t"].shape == (16,) and fbuf.stores() == []


@pytest.mark.more
def test_without_the_graveyard_the_read_fails(gate, monkeypatch):
    monkeypatch.setattr(lifetime, "_bury", lambda id, until: lifetime._drop(id))
    batch = read_and_drop("host")
    gate.set()
    raises_late("is not open in this process", lambda: batch)


def test_a_dropped_store_does_not_wait_for_ever(gate, monkeypatch):
    buffer = make("host")
    state, pending = filled(buffer), behind(KEY)
    del state
    assert len(fbuf.stores()) == 1
    del pending  # gone; the next, made before it is looked for, keeps the store
    pending = behind(KEY)
    assert len(fbuf.stores()) == 1
    late_now = lifetime.time.monotonic() + lifetime._PATIENCE
    monkeypatch.setattr(lifetime, "time", type("Later", (), {"monotonic": staticmethod(lambda: late_now)}))
    assert len(fbuf.stores()) == 1  # what is known to be pending is waited for
    del pending
    pending = behind(KEY)
    assert fbuf.stores() == [] and not pending.is_ready()


@pytest.mark.more
def test_single_leaves_do_not_own_the_store(storage):
    buffer, state = full(storage)
    leaves, structure = jax.tree.flatten(late(state))
    del state
    gc.collect()
    jax.block_until_ready(leaves)
    assert fbuf.stores() == []
    orphan = jax.tree.unflatten(structure, leaves)
    other = filled(buffer, 900)  # takes the slot
    assert other.rows.slot == orphan.rows.slot
    again = jax.tree.unflatten(structure, leaves)
    assert again.rows.owner is None
    for bad in (orphan, again, jax.tree.unflatten(structure, late(leaves))):  # the id of the last comes late
        for form in (lambda f: f, jax.jit):
            raises_late(NOT_OPEN, form(lambda s: buffer.peek(s, KEY, 4)), bad)
            raises_late(NOT_OPEN, form(lambda s: buffer.extend(s, rows_of(0, 2))), bad)
    np.testing.assert_array_equal(agree(buffer.rows(other)), np.arange(900, 908))


def test_a_handle_closes_its_store(storage):
    buffer, state = full(storage)
    (handle,) = fbuf.stores()
    assert handle.id == id_of(state) and not handle.waiting
    assert handle.nbytes == buffer.nbytes(state)["host"] > 0 and handle.stats()["rows_live"] == 8
    assert f"{handle.id:016x}, 8 rows" in repr(handle)
    with handle as entered:
        assert entered is handle and agree(buffer.rows(state)).size == 8
    assert fbuf.stores() == [] and repr(handle) == f"StoreHandle({handle.id:016x}, closed)"
    handle.close()
    attempts = [
        lambda: buffer.sample(state, KEY, 4),
        lambda: buffer.extend(state, rows_of(0, 2)),
        lambda: buffer.update_rows(state, fbuf.Index(jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.uint32)), rows_of(0, 1)),
        lambda: buffer.nbytes(state),
        lambda: buffer.storage.to_arrays(state.rows),
        lambda: handle.nbytes,
    ]
    for attempt in attempts:
        raises_late(NOT_OPEN, attempt)
    again = filled(buffer, 50)
    assert agree(buffer.rows(again))[0] == 50


def test_closing_while_others_read():
    buffer, state = full("compressed")

    def read():
        for i in itertools.count():
            assert agree(buffer.peek(state, np.array([0, i], np.uint32), 8)).size == 8

    threads = [Thread(read) for _ in range(2)]
    agree(buffer.peek(state, KEY, 8))
    fbuf.stores()[0].close()
    for thread in threads:
        raises((RuntimeError, ValueError), "not open|closed", thread.ends)


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickling_is_refused_with_what_to_do(protocol):
    buffer, state = full("host")
    said = r"cannot be pickled.*fbuf\.save\(path, buffer, state\).*jax\.device_get\(buffer\.rows\(state\)\)"
    raises(TypeError, said, pickle.dumps, state, protocol)
    rows = jax.device_get(buffer.rows(state))
    back = buffer.extend(buffer.init(EXAMPLE), rows.data)
    np.testing.assert_array_equal(agree(buffer.rows(back)), np.arange(8))


def test_states_are_pytrees(storage):
    buffer, state = full(storage)
    forms = {
        "map": jax.tree.map(lambda x: x, state),
        "map with path": jax.tree_util.tree_map_with_path(lambda path, x: x, state),
        "device_put": jax.device_put(state, jax.devices()[0]),
        "copied": jax.tree.map(jnp.copy, state),
        "jit": jax.jit(lambda s: s)(state),
        "numpy": jax.device_get(state),
        "late": late(state),
        "cond": lax.cond(jnp.array(True), lambda a, b: a, lambda a, b: b, state, state),
        "two": jax.tree.map(lambda a, b: jnp.where(jnp.array(True), a, b), state, state),
    }
    original = state.rows.owner
    del state
    for name, form in forms.items():
        assert form.rows.owner is original, name
        np.testing.assert_array_equal(agree(buffer.rows(form)), np.arange(8), err_msg=name)
        assert agree(buffer.rows(buffer.extend(form, rows_of(8, 1))))[-1] == 8, name
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(forms["map"].rows)]
    assert paths == [".id", ".ticket", ".device['t']"]
    del forms, form, original
    gc.collect()
    assert fbuf.stores() == []


def test_init_cannot_be_traced(storage):
    buffer = make(storage)

    def init(x):
        return buffer.init(EXAMPLE)

    for attempt in (
        lambda: jax.jit(init)(0),
        lambda: jax.vmap(init)(jnp.zeros(3)),
        lambda: jax.jit(jax.vmap(init))(jnp.zeros(3)),
        lambda: lax.scan(lambda c, x: (init(x), x), filled(buffer), jnp.zeros(3)),
        lambda: jax.eval_shape(init, 0),
        lambda: lax.cond(jnp.array(True), init, init, 0),
    ):
        raises(TypeError, r"cannot be traced.*buffer\.init\(example\) outside jit, vmap and scan", attempt)
    assert fbuf.stores() == []


@pytest.mark.more
def test_a_pending_write_without_a_reader_raises_no_error(storage):
    script = f"""
import gc, jax, jax.numpy as jnp, fbuf
from tests.support.ownership import EXAMPLE, filled, late, make, rows_of
buffer = make({storage!r})
for i in range(4):
    state = buffer.extend(filled(buffer), late(rows_of(8, 4)))
    del state
    gc.collect()
pending = late(rows_of(0, 1))
jax.block_until_ready(pending)
assert fbuf.stores() == [], fbuf.stores()
state = buffer.extend(filled(buffer), late(rows_of(8, 4)))  # pending when the interpreter ends
print("done")
"""
    done = run_python(script)
    assert done.stdout.strip() == "done" and done.stderr.strip() == ""


@pytest.mark.more
def test_the_garbage_collector_may_come_inside_a_callback():
    buffer, state = full("host")
    store = lifetime.find(id_of(state))
    box = [state]
    box.append(box)  # only the collector can free it
    del state

    def collect():
        with store._writing, store._lock:
            box.clear()
            gc.collect()
            fbuf.stores()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    assert fbuf.stores() == []


@pytest.mark.more
def test_one_trace_for_each_store_open_at_the_same_time():
    buffer = make("host")
    traces = []

    @jax.jit
    def step(state):
        traces.append(state.rows.slot)
        return buffer.extend(state, rows_of(0, 2))

    gc.collect()
    others = len(fbuf.stores())  # of fixtures of a wider scope
    one, two = filled(buffer), filled(buffer)
    for state in (one, two, one, two):
        jax.block_until_ready(step(state))
    assert len(traces) == 2 == len(set(traces))
    del state
    for _ in range(3):
        del one, two
        gc.collect()
        assert len(fbuf.stores()) == others
        one, two = filled(buffer, 100), filled(buffer, 200)
        changed = [step(s) for s in (one, two)]
        assert [agree(buffer.rows(s))[0] for s in changed] == [102, 202]
        del changed
    assert len(traces) == 2


@pytest.mark.more
def test_a_state_of_another_process_is_refused(storage, tmp_path):
    buffer, state = full(storage)
    path = tmp_path / "leaves.npz"
    np.savez(path, *(np.asarray(x) for x in jax.tree.leaves(state)))
    script = f"""
import jax, numpy as np
from tests.support.ownership import KEY, filled, make
buffer = make({storage!r})
mine = filled(buffer, 500)
given = jax.tree.unflatten(jax.tree.structure(mine), np.load({str(path)!r}, allow_pickle=False).values())
try:
    jax.block_until_ready(buffer.peek(given, KEY, 4))
except (RuntimeError, ValueError) as error:
    assert "belongs to another process" in str(error) and "fbuf.save(path, buffer, state)" in str(error)
    print("refused")
"""
    assert run_python(script).stdout.strip() == "refused"


@pytest.mark.more
def test_a_deep_copy_shares_the_store_and_goes_its_own_way(storage):
    buffer, state = full(storage)
    for other in (copy.deepcopy(state), copy.copy(state)):
        assert len(fbuf.stores()) == 1 and other.rows.owner is state.rows.owner
    other = copy.deepcopy(state)
    donating = jax.jit(buffer.extend, donate_argnums=0)
    other, first = donating(other, rows_of(100, 3)), state
    state = buffer.extend(state, rows_of(200, 4))
    np.testing.assert_array_equal(agree(buffer.rows(other)), [*range(3, 8), 100, 101, 102])
    np.testing.assert_array_equal(agree(buffer.rows(state)), [*range(4, 8), 200, 201, 202, 203])
    np.testing.assert_array_equal(agree(buffer.rows(first)), np.arange(8))
    del state, first
    gc.collect()
    assert agree(buffer.rows(other)).size == 8
    del other
    gc.collect()
    assert fbuf.stores() == []


@pytest.mark.more
def test_shapes_and_compilation_ahead_of_time(storage):
    buffer, state = full(storage)
    before = fbuf.stores()[0].stats()
    step = jax.jit(lambda s, r: buffer.sample(buffer.extend(s, r), KEY, 4), donate_argnums=0)
    shapes, batch = jax.eval_shape(step, state, rows_of(0, 3))
    assert batch.data["obs"].shape == (4, 6) and shapes.rows.owner is None
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    compiled = step.lower(abstract, rows_of(0, 3)).compile()
    assert fbuf.stores()[0].stats() == before
    for i in range(3):
        state, batch = compiled(state, rows_of(10 * i, 3))
        assert agree(batch).size == 4
    assert agree(buffer.rows(state))[-1] == 22


@pytest.mark.exhaustive
def test_opening_and_dropping_in_threads():
    buffer = make("host")

    def work(first):
        for i in range(20):
            assert agree(buffer.rows(filled(buffer, first + i)))[0] == first + i

    for thread in [Thread(work, 1000 * i) for i in range(3)]:
        thread.ends()
    gc.collect()
    assert fbuf.stores() == []
