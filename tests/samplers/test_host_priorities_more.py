"""More of priorities on the host: states too old, bytes, other callbacks; see `tests/samplers/test_host_priorities.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Prioritized
from tests.support.host import use_other_callbacks
from tests.support.host_priorities import CAPACITY, EXAMPLE, EXPIRED, compare, make, run, verb
from tests.support.refusals import raises_late
from tests.support.trees import same

pytestmark = pytest.mark.more


def test_a_state_that_is_too_old_says_so():
    buffer = fbuf.Buffer(CAPACITY, sampler=Prioritized(on="host"))
    old = buffer.extend(buffer.init({"x": 0}), {"x": jnp.arange(CAPACITY)})
    new = old
    add = jax.jit(buffer.add)
    for i in range(260):
        new = add(new, {"x": i})
    for attempt in (
        lambda: buffer.sample(old, jax.random.key(0), 4),
        lambda: buffer.clear(old),
        lambda: add(old, {"x": 0}),
        lambda: jax.jit(buffer.add, donate_argnums=0)(old, {"x": 0}),
    ):
        raises_late(EXPIRED, attempt)
    assert isinstance(fbuf.stores()[0]._store.last_error, RuntimeError)
    assert np.asarray(buffer.sample(new, jax.random.key(0), 4)[1].mask).all()  # who carries on does not notice


def test_bytes_are_counted():
    example, capacity = {"x": jnp.zeros(4)}, 50_000
    for storage in (fbuf.storages.Device(), fbuf.storages.Host()):
        samplers = (Prioritized(on=on, normalize="buffer") for on in ("device", "host"))
        device, host = (fbuf.Buffer(capacity, storage=storage, sampler=sampler) for sampler in samplers)
        state, other = host.init(example), device.init(example)
        assert host.nbytes(state)["device"] < device.nbytes(other)["device"] - 9 * capacity
        assert host.nbytes(state)["device"] == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        own = host.nbytes(state)["host"] - device.nbytes(other)["host"]
        assert 5 * capacity < own < 5.5 * capacity
        assert sum(handle.nbytes for handle in fbuf.stores()) >= own
        if storage == fbuf.storages.Device():
            plan = host.plan(example)
            assert plan.device == host.nbytes(state)["device"] and plan.host_from == "exact"
            assert own <= plan.host == plan.host_raw < 2 * own + 256 * 600
        del state, other


def test_the_callbacks_for_accelerators_agree(monkeypatch):
    plain = make("host")
    buffer = dataclasses.replace(plain, sampler=Prioritized(on="host", beta=0.5))  # `verb` gives beta; traced anew

    def step(state, seed):
        return verb(buffer, "learn", verb(buffer, "extend", state, seed)[0], seed)

    stack = functools.partial(jax.tree.map, lambda *x: np.stack(x))
    expected, single = plain.init(EXAMPLE), []
    for seed in np.arange(4, dtype=np.int32):
        expected, batch = run(plain)("learn", run(plain)("extend", expected, seed)[0], seed)
        single.append(batch)
    keys = jax.random.split(jax.random.key(0), 3)
    peeked = [plain.peek(expected, key, 4, beta=0.7) for key in keys]
    same(stack(*peeked), jax.vmap(lambda key: plain.peek(expected, key, 4, beta=0.7))(keys))
    used = use_other_callbacks(monkeypatch)
    state, batches = jax.jit(lambda state: lax.scan(step, state, jnp.arange(4)))(buffer.init(EXAMPLE))
    same(stack(*single), batches)
    compare(expected, state)
    many = jax.vmap(lambda key: buffer.peek(state, key, 4, beta=0.7))(keys)
    same(stack(*peeked), many)
    assert set(used) == {"io_callback", "pure_callback"}
    with pytest.raises(TypeError, match="priorities live on the host cannot be vmapped"):
        jax.vmap(lambda x: buffer.set(buffer.clear(verb(buffer, "extend", state, x)[0])))(jnp.arange(2))
