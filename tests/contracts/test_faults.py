"""Faults of the system and of the caller: no memory, callbacks that raise, wild priorities, keys used twice.

The state is afterwards as it was before, or the error says that it is lost. Faults of files are tested in
`tests/formats`, `tests/checkpoint` and `tests/host`; invalid input is tested in `test_errors.py`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import fbuf
from fbuf._host.store.store import Store
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Device, Host
from tests.support import faults
from tests.support.refusals import raises


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_memory_during_extend():
    faults.check_no_memory("host")


@pytest.mark.parametrize(("storage", "place"), [(Device(), "device"), (Host(), "host")])
def test_no_memory_at_init(storage, place, monkeypatch):
    buffer = fbuf.Buffer(1 << 30, storage=storage)
    size = (1 << 30) * 36
    plan = buffer.plan(faults.EXAMPLE)
    assert plan.device == pytest.approx(size if place == "device" else 8 << 30, rel=0.01)
    assert plan.host >= (size if place == "host" else 0)

    def full(*args, **kwargs):
        if place == "host":
            raise MemoryError("Unable to allocate 32.0 GiB")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.")

    monkeypatch.setattr(Store, "__init__", full)
    monkeypatch.setattr("fbuf.storages._array_rows.allocate", full)
    with pytest.raises(
        MemoryError, match=rf"Buffer.init: there is no room for .*\d+ bytes on the {place}.*buffer.plan"
    ):
        buffer.init(faults.EXAMPLE)
    monkeypatch.undo()
    assert fbuf.stores() == []


def test_a_callback_that_raises_at_any_call(monkeypatch):
    faults.check_raising("write", True, monkeypatch)


def test_each_write_happens_once(monkeypatch):
    buffer = fbuf.Buffer(64, storage=Host())
    calls, real = list[int](), Store.write
    monkeypatch.setattr(Store, "write", lambda self, rows, *args: calls.append(len(rows[0])) or real(self, rows, *args))
    rows = jax.tree.map(jnp.asarray, faults.rows_of(0, 3))

    def twice(state):
        buffer.extend(state, rows)  # nobody looks at it
        return buffer.extend(state, rows)

    def looped(state):
        return lax.fori_loop(0, 5, lambda i, s: buffer.extend(s, rows), state)

    def scanned(state):
        def step(state, wanted):
            return lax.cond(wanted, lambda s: buffer.extend(s, rows), lambda s: s, state), None

        return lax.scan(step, state, jnp.array([True, False, True, False]))[0]

    for fn, expected in ((twice, 2), (looped, 5), (scanned, 2)):
        state = jax.block_until_ready(buffer.init(faults.EXAMPLE))
        calls.clear()
        state = jax.block_until_ready(jax.jit(fn)(state))
        assert calls == [3] * expected, fn.__name__
        kept = {"twice": 1, "looped": 5, "scanned": 2}[fn.__name__]
        assert faults.held(buffer, state) == [0, 1, 2] * kept
        tickets = np.asarray(state.rows.ticket)[: 3 * kept].view(np.uint64).reshape(-1)
        assert len(set(tickets.tolist())) == len(tickets)  # no two rows alike


@settings(max_examples=60)
@given(**faults.PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws(errors, alpha):
    faults.check_priorities(Prioritized(alpha=1.0, eps=0.0), errors, alpha)


def test_batches_and_windows_larger_than_the_buffer():
    buffer = fbuf.Buffer(4)
    state = buffer.extend(buffer.init(faults.EXAMPLE), faults.rows_of(0, 9))  # of more rows than fit the newest stay
    assert faults.held(buffer, state) == [5, 6, 7, 8]
    _, batch = buffer.sample(state, jax.random.key(0), 50)
    assert batch.mask.all() and set(np.asarray(batch.data["t"]).tolist()) == {5, 6, 7, 8}
    with pytest.raises(ValueError, match=r"Sequence\(.*reads 6 rows at a time, but there are 4.*capacity=6"):
        fbuf.Buffer(4, view=fbuf.views.Sequence(6, boundary="cross", autoreset="same_step"))
    raises(ValueError, "n is 5; expected an int from 1 to 4", buffer.last, state, 5)


def test_a_key_used_twice_is_found():
    faults.check_key_reuse(Uniform(), 1)
