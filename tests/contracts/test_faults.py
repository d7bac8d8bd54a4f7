"""Faults of the system and of the caller: no memory, callbacks that raise, wild priorities, keys used twice."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.store.store import Store
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Device, Host
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import by_tier, checks

EXAMPLE = {"x": np.zeros(8, np.float32), "t": np.int32(0)}


def rows_of(first, count):
    t = np.arange(first, first + count, dtype=np.int32)
    return {"x": np.repeat(t[:, None].astype(np.float32), 8, 1), "t": t}


def held(buffer, state):
    rows = buffer.rows(state)
    return np.asarray(rows.data["t"])[np.asarray(rows.mask)].tolist()


SCARCE = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np, fbuf
storage = {"host": fbuf.storages.Host(), "compressed": fbuf.storages.Compressed()}[sys.argv[1]]
buffer = fbuf.Buffer(200_000, storage=storage)
example = {"x": np.zeros(2048, np.uint8)}
rng = np.random.default_rng(0)
rows = {"x": rng.integers(0, 256, (2000, 2048), np.uint8)}
state = jax.block_until_ready(buffer.extend(buffer.init(example), rows))
before = np.asarray(buffer.rows(state, last=100).data["x"])
used = int(open("/proc/self/statm").read().split()[0]) * 4096
failed = False
resource.setrlimit(resource.RLIMIT_AS, (used + (120 << 20), resource.RLIM_INFINITY))
keep = []
try:
    for i in range(100):
        keep.append(np.ones(8 << 20, np.uint8))  # somebody else's
        state = jax.block_until_ready(buffer.extend(state, rows))
        before = np.asarray(buffer.rows(state, last=100).data["x"])
except BaseException as error:
    failed = True
    text = f"{type(error).__name__}: {error}"
    assert "emory" in text or "RESOURCE_EXHAUSTED" in text, text
keep.clear()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert failed
assert (np.asarray(buffer.rows(state, last=100).data["x"]) == before).all()
size = int(buffer.size(state))
state = jax.block_until_ready(buffer.extend(state, rows))
assert int(buffer.size(state)) == size + 2000
assert (np.asarray(buffer.rows(state, last=2000).data["x"]) == rows["x"]).all()
assert len(fbuf.stores()) == 1
print("as before")
"""


def check_raising(verb, donated, monkeypatch):
    """In a scan of four steps: what was written before it is there, nothing else is, and a state from before goes on."""
    buffer = fbuf.Buffer(64, storage=Host())

    def run(state, firsts):
        def step(state, first):
            rows = {"x": jnp.ones((2, 8)) * first, "t": first + jnp.arange(2, dtype=jnp.int32)}
            state, batch = buffer.sample(buffer.extend(state, rows), jax.random.key(0), 3)
            return state, batch.data["t"]

        return lax.scan(step, state, firsts)

    jitted = jax.jit(run, donate_argnums=0 if donated else ())
    firsts = jnp.arange(100, 140, 10, dtype=jnp.int32)
    real = getattr(Store, verb)
    for failing in range(4):
        state = jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows_of(0, 5)))
        old = jax.tree.map(jnp.copy, state)
        store = lifetime.find(lifetime.join_id(np.asarray(state.rows.id)))
        calls = []

        def raising(self, *args, calls=calls, failing=failing, **kwargs):
            calls.append(1)
            if len(calls) > failing:
                raise KeyError(f"injected into call {len(calls)}")
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Store, verb, raising)
            with pytest.raises(Exception, match=rf"injected into call {failing + 1}"):
                jax.block_until_ready(jitted(state, firsts))
        assert len(calls) == failing + 1  # nothing goes on after it
        assert store.stats()["rows_accepted"] == 5 + 2 * (failing + (verb == "read"))
        assert held(buffer, old) == list(range(5))
        if donated:
            raises(RuntimeError, "deleted|donated", np.asarray, state.header)
        again = buffer.extend(old, rows_of(50, 2))
        assert held(buffer, again) == [0, 1, 2, 3, 4, 50, 51]
        del state, old, again, store
    # JAX before 0.10 holds the operands of the last program that failed.
    assert len(fbuf.stores()) <= (jax.__version_info__ < (0, 10))


SIZE = 16
WILD = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -0.0, 1e-45, -3.0, 3.4e38])
PRIORITIES = {"errors": st.lists(WILD, min_size=SIZE, max_size=SIZE), "alpha": st.sampled_from([0.0, 0.6, 1.0])}


def check_priorities(sampler, errors, alpha):
    """NaN and infinite ones are refused and counted, negative ones count by magnitude; chances are what they say."""
    buffer = fbuf.Buffer(SIZE, sampler=sampler)
    state = buffer.set(buffer.extend(buffer.init(EXAMPLE), rows_of(0, SIZE)), alpha=alpha)
    given = np.array(errors, np.float32)
    state = buffer.update_priority(state, buffer.rows(state).index, given)
    fine = np.isfinite(given)
    assert int(buffer.stats(state)["refused_nonfinite"]) == int((~fine).sum())
    state, batch = buffer.sample(state, jax.random.key(0), 64)
    slot, chance, weight = (np.asarray(x) for x in (batch.index.slot, batch.probability, batch.weight))
    assert batch.mask.all() and ((slot >= 0) & (slot < SIZE)).all()
    assert np.isfinite(chance).all() and (chance > 0).all() and (chance <= 1 + 1e-6).all()
    assert np.isfinite(weight).all() and (weight > 0).all() and (weight <= 1).all()
    np.testing.assert_array_equal(batch.data["t"], slot)
    if isinstance(sampler, Prioritized) and alpha == 1.0:
        leaf = np.where(fine, np.abs(given), 1.0).astype(np.float64)  # 1.0: what new rows begin with
        if leaf.sum() < 3e38 and leaf.max() > 1e-30:
            np.testing.assert_allclose(chance, (leaf / leaf.sum())[slot], rtol=1e-4, atol=1e-7)


def check_key_reuse(sampler, prefetch):
    """A key used twice is found, and keys that are split are not taken for one."""
    buffer = fbuf.Buffer(8, sampler=sampler, prefetch=prefetch, batch_size=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 6))

    def split(state, key):
        first, second = jax.random.split(key)
        return buffer.sample(buffer.sample(state, first)[0], second)

    with jax.debug_key_reuse(True):
        jax.block_until_ready(jax.jit(split)(state, jax.random.key(1)))
        if isinstance(sampler, (Uniform, Ranked, Consume, Staleness)):  # others read the key's words, or draw in a loop
            twice = jax.jit(lambda state, key: buffer.sample(buffer.sample(state, key)[0], key))
            raises(jax.errors.KeyReuseError, None, twice, state, jax.random.key(1))


def check_many_keys(sampler):
    """Where states are mapped over too, branches become selects, between keys as well."""
    buffer = fbuf.Buffer(8, sampler=sampler, batch_size=4)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 6))
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    keys = jax.random.split(jax.random.key(0))
    with jax.debug_key_reuse(True):
        many = jax.jit(jax.vmap(buffer.sample))(states, keys)[1]
    np.testing.assert_array_equal(many.index.slot[1], buffer.sample(state, keys[1])[1].index.slot)


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("storage", by_tier("host", more=["compressed"]))
def test_a_process_without_memory_for_extend_goes_on(storage):
    assert "as before" in run_python(SCARCE, storage, MALLOC_ARENA_MAX="2").stdout


@pytest.mark.parametrize(("storage", "place"), [(Device(), "device"), (Host(), "host")])
def test_no_memory_at_init(storage, place, monkeypatch):
    buffer = fbuf.Buffer(1 << 30, storage=storage)
    size = (1 << 30) * 36
    plan = buffer.plan(EXAMPLE)
    assert plan.device == pytest.approx(size if place == "device" else 8 << 30, rel=0.01)
    assert plan.host >= (size if place == "host" else 0)

    def full(*args, **kwargs):
        if place == "host":
            raise MemoryError("Unable to allocate 32.0 GiB")
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 34359738368 bytes.")

    monkeypatch.setattr(Store, "__init__", full)
    monkeypatch.setattr("fbuf.storages._array_rows.allocate", full)
    said = rf"Buffer.init: there is no room for .*\d+ bytes on the {place}.*buffer.plan"
    raises(MemoryError, said, buffer.init, EXAMPLE)
    monkeypatch.undo()
    assert fbuf.stores() == []


def test_a_callback_that_raises_at_any_call(monkeypatch):
    check_raising("try_write", True, monkeypatch)


@pytest.mark.more
def test_each_write_happens_once(monkeypatch):
    buffer = fbuf.Buffer(64, storage=Host())
    calls, real = list[int](), Store.try_write
    monkeypatch.setattr(
        Store, "try_write", lambda self, rows, *args: calls.append(len(rows[0])) or real(self, rows, *args)
    )
    rows = jax.tree.map(jnp.asarray, rows_of(0, 3))

    def twice(state):
        buffer.extend(state, rows)  # this state is dropped
        return buffer.extend(state, rows)

    def looped(state):
        return lax.fori_loop(0, 5, lambda i, s: buffer.extend(s, rows), state)

    def scanned(state):
        def step(state, wanted):
            return lax.cond(wanted, lambda s: buffer.extend(s, rows), lambda s: s, state), None

        return lax.scan(step, state, jnp.array([True, False, True, False]))[0]

    for fn, expected, kept in ((twice, 2, 1), (looped, 5, 5), (scanned, 2, 2)):
        state = jax.block_until_ready(buffer.init(EXAMPLE))
        calls.clear()
        state = jax.block_until_ready(jax.jit(fn)(state))
        assert calls == [3] * expected, fn.__name__
        assert held(buffer, state) == [0, 1, 2] * kept
        tickets = np.asarray(state.rows.ticket)[: 3 * kept].view(np.uint64).reshape(-1)
        assert len(set(tickets.tolist())) == len(tickets)  # no two rows alike


@pytest.mark.more
@settings(max_examples=60)
@given(**PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws(errors, alpha):
    check_priorities(Prioritized(alpha=1.0, eps=0.0), errors, alpha)


@pytest.mark.more
@given(**PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws_by_rank(errors, alpha):
    check_priorities(Ranked(), errors, alpha)


def test_no_key_is_used_twice():
    check_key_reuse(Uniform(), 1)


KEYED = [Uniform(), Ranked(), Consume(2), Staleness(4), Epoch(), Prioritized(), Prioritized(on="host")]
test_callbacks_that_raise_and_keys = checks(
    more=[
        (check_raising, [("try_write", False), ("read", False), ("read", True)]),
        (check_many_keys, [Epoch()]),
        (check_key_reuse, [(Consume(2), 1), (Prioritized(on="host"), 1)]),
    ],
    exhaustive=[
        (check_key_reuse, itertools.product(KEYED, [0, 1])),
        (check_many_keys, [Prioritized(), Prioritized(replace=False), Ranked()]),
    ],
)
