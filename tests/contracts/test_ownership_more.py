import copy
import gc
import threading

import jax
import numpy as np
import pytest

import fbuf
from fbuf._bridge import lifetime
from tests.contracts.test_ownership import nothing_left  # noqa: F401
from tests.support import ownership as _support
from tests.support.ownership import KEY, agree, filled, full, id_of, make, rows_of
from tests.support.processes import run_python

pytestmark = pytest.mark.more

storage = _support.storage


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
