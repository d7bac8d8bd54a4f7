"""`Buffer(prefetch=1)`: each `sample` returns the batch drawn by the one before."""

import dataclasses
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host.store.store import Store
from fbuf.samplers import Prioritized
from fbuf.storages import Host
from tests.support import prefetch, refusals
from tests.support.host import trace_for_accelerators
from tests.support.ownership import store_of
from tests.support.prefetch import (  # noqa: F401
    BATCH,
    CHECKS,
    EXAMPLE,
    GATE,
    check_batches,
    errors_at,
    filled,
    gate,
    make,
    rows_at,
    wait_for_reads,
)
from tests.support.processes import run_python
from tests.support.refusals import raises, raises_late
from tests.support.tables import checks, pairwise
from tests.support.threads import PATIENCE, Thread
from tests.support.trees import same

test_sample_returns_the_batch_of_the_previous_call = checks(
    (check_batches, [("compressed", "prioritized", "row", "donated")]),
    (CHECKS[1], ["compressed"]),
    more=[(check_batches, [("host", "epoch", "row", "jit")]), *((CHECKS[i], ["compressed"]) for i in (0, 2))],
)


@pytest.mark.more
def test_a_replay_counts_stale_draws():
    replay = fbuf.Replay(make("compressed", "prioritized"), EXAMPLE, seed=0)
    raises(ValueError, "no row can be sampled", replay.sample, to="numpy")
    for i in range(12):  # evicts every row more than twice
        replay.extend(rows_at(i))
        batch = replay.sample(to="numpy")
        assert (np.asarray(batch.data["obs"])[:, 0, 0] == np.asarray(batch.data["t"]) % 251).all()
        replay.update_priority(batch.index, errors_at(i))
    stats = replay.stats()
    assert stats["stale_draws"] > 0 and stats["refused_stale"] == stats["stale_draws"]
    assert replay.stats()["host_bytes"] > 0


def test_a_converted_state_draws_ahead():
    ahead = make("device")
    plain = dataclasses.replace(ahead, prefetch=0, batch_size=None)
    state = plain.convert(ahead, plain.extend(plain.init(EXAMPLE), rows_at(0)))
    state, _ = ahead.sample(state, jax.random.key(0))
    assert ahead.sample(state, jax.random.key(1))[1].mask.all()


INVALID = """
fbuf.Buffer(10, prefetch=2, batch_size=4) => ValueError prefetch is 2; expected 0, or 1
fbuf.Buffer(10, prefetch=True, batch_size=4) => ValueError prefetch is True
fbuf.Buffer(10, prefetch=1) => ValueError batch_size is None | Buffer(..., batch_size=
fbuf.Buffer(10, prefetch=1, batch_size=0) => ValueError batch_size is 0; expected an int >= 1
fbuf.Buffer(10, prefetch=1, batch_size=4.0) => TypeError batch_size is float
fbuf.Buffer(10).sample(fbuf.Buffer(10).init({"x": 0.0}), jax.random.key(0)) => TypeError batch_size is missing
"""


def test_invalid_batch_sizes_are_refused():
    refusals.check_all(INVALID, globals())
    buffer = make("compressed", "prioritized")
    state = buffer.init(EXAMPLE)
    raises(ValueError, r"batch_size is 7, but the state holds a", lambda: buffer.sample(state, jax.random.key(0), 7))
    assert buffer.sample(state, jax.random.key(0), BATCH)[1].mask.shape == (BATCH,)
    assert buffer.peek(state, jax.random.key(0), 7).mask.shape == (7,)


def test_a_donated_step_does_not_wait_for_decoding(monkeypatch):
    buffer, collecting, collect = make("gated"), threading.Event(), Store.collect
    step = jax.jit(buffer.sample, donate_argnums=0)
    state = filled(buffer)
    state, _ = jax.block_until_ready(step(state, jax.random.key(1)))  # compiled
    wait_for_reads(store_of(state))
    then = jax.device_get(buffer.peek(state, jax.random.key(2)))
    GATE.open.clear()
    GATE.entered.clear()
    state, batch = jax.block_until_ready(step(state, jax.random.key(2)))
    total = jax.block_until_ready(jnp.sum(batch.data["t"], dtype=jnp.int32))  # computations after it end, too
    assert GATE.entered.wait(PATIENCE)
    assert not all(r.done.is_set() for r in store_of(state)._ahead._requests.values())
    monkeypatch.setattr(Store, "collect", lambda self, *args: collecting.set() or collect(self, *args))
    opener = Thread(lambda: collecting.wait(PATIENCE) and GATE.open.set())
    state, late = step(state, jax.random.key(3))  # waits for the gate
    same(late, then)
    opener.ends()
    assert int(total) >= 0


def test_a_failure_in_the_thread_is_retried():
    buffer = make("gated")
    state = filled(buffer)
    then = jax.device_get(buffer.peek(state, jax.random.key(1)))
    wait_for_reads(store_of(state))
    GATE.fails = lambda: threading.current_thread().name == "fbuf-read-ahead"
    state, _ = buffer.sample(state, jax.random.key(1))
    state, batch = buffer.sample(buffer.extend(state, rows_at(1)), jax.random.key(2))
    same(batch, then)
    GATE.fails = lambda: True
    raises_late("no such luck", lambda: buffer.sample(state, jax.random.key(3))[1])
    GATE.fails = lambda: False
    assert buffer.sample(state, jax.random.key(3))[1].mask.all()


def test_a_failed_request_is_read_later(monkeypatch):
    buffer = make("compressed", "prioritized")
    state = filled(buffer)

    def fail(*_):
        raise RuntimeError("no requests today")

    monkeypatch.setattr(Store, "request", fail)
    for i in range(3):
        then = jax.device_get(buffer.peek(state, jax.random.key(i)))
        state, _ = buffer.sample(state, jax.random.key(i))
        assert int(state.ahead.held.number) == 0
        state, batch = buffer.sample(state, jax.random.key(9))
        same(batch, then)


@pytest.mark.more
def test_rows_that_expire_unread_are_masked(monkeypatch):
    buffer = dataclasses.replace(make(), storage=Host(keys=("obs",), slack=0, on_expired="mask"))
    state = filled(buffer)
    monkeypatch.setattr(Store, "request", lambda *_: 0)
    state, _ = buffer.sample(state, jax.random.key(1))
    state = buffer.extend(state, rows_at(1, 20))
    state, batch = buffer.sample(state, jax.random.key(2))
    assert not batch.mask.any() and not np.asarray(batch.data["t"]).any() and not np.asarray(batch.weight).any()
    stats = buffer.stats(state)
    assert int(stats["expired_rows"]) == int(stats["stale_draws"]) == BATCH


@pytest.mark.more
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_its_own_rows():
    script = """
import os, sys, warnings
import numpy as np
from fbuf._host.store.store import Column, Store
warnings.simplefilter("ignore")
s = Store((Column("a", (), np.dtype(np.int32), None),), lanes=1, length=8, slack=0)
tickets = s.write([np.arange(8, dtype=np.int32)[:, None]], None)[:, 0]
numbers = [s.request([(0, tickets)])]
pid = os.fork()
for _ in range(3):
    numbers.append(s.request([(0, tickets)]))
for number in numbers:
    out = np.zeros(8, np.int32)
    assert s.collect(number, [(0, tickets, out)]).all() and (out == np.arange(8)).all()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    run_python(script)


@pytest.mark.more
@pytest.mark.parametrize("pending", [False, True])
def test_the_interpreter_exits_during_reads(pending):
    script = f"""
import fbuf, jax, numpy as np
buffer = fbuf.Buffer(64, storage=fbuf.storages.Compressed(keys=("x",)), prefetch=1, batch_size=2000)
state = buffer.init({{"x": np.zeros((64, 64), np.uint8)}})
state = buffer.extend(state, {{"x": np.ones((64, 64, 64), np.uint8)}})
for i in range(3):
    state, batch = buffer.sample(state, jax.random.key(i))
if not {pending}:
    jax.block_until_ready(batch)
    del state, batch
print("done")
"""
    done = run_python(script)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.more
def test_convert_to_and_from_prefetch():
    buffer = make("compressed", "uniform")
    other = dataclasses.replace(buffer, sampler=Prioritized(), batch_size=3)
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    converted = buffer.convert(other, state)
    now = other.peek(converted, jax.random.fold_in(jax.random.key(1), 1))
    converted, batch = other.sample(converted, jax.random.key(1))
    same(batch, now)
    plain = dataclasses.replace(other, prefetch=0)
    assert other.convert(plain, converted).ahead is None
    with pytest.raises(ValueError, match=r"prefetch, batch_size.*buffer\.convert\(other, state\)"):
        plain.sample(converted, jax.random.key(0))
    raises(ValueError, "made by another buffer", lambda: buffer.sample(converted, jax.random.key(0)))
    with pytest.raises(ValueError, match="made by another buffer"):
        dataclasses.replace(other, batch_size=4).sample(converted, jax.random.key(0))


PREFETCHED = ("device", "deduplicated", "host", "compressed")
ORDERS = [(s, "prioritized", "transition", "sesu") for s in ("device", "compressed")]
ORDERS += [("compressed", "consume", "row", "ses"), ("device", "consume", "row", "esr")]
ORDERS += [("deduplicated", "epoch", "sequence", "esr"), ("device", "uniform", "transition", "se")]

KEY = jax.random.key(7)


DRAWN = pairwise(PREFETCHED, prefetch.SAMPLERS, prefetch.VIEWS, ("eager", "jit", "donated", "scan"))


test_further_batches_are_those_of_the_previous_call = checks(
    more=[
        (check_batches, [("host", "consume", "sequence", "eager"), ("compressed", "uniform", "hindsight", "scan")]),
        *((check, ["compressed"]) for check in CHECKS[4:]),
    ],
    exhaustive=[
        (prefetch.check_batches, DRAWN),
        *((check, ["compressed", "deduplicated"]) for check in prefetch.CHECKS),
    ],
)


test_a_donated_step_copies_nothing = pytest.mark.in_place(checks(exhaustive=[(prefetch.check_in_place, ORDERS)]))


@pytest.mark.exhaustive
def test_states_and_keys_under_vmap_draw_independently():
    keys = jax.random.split(jax.random.key(1), 3)
    for sampler in ("prioritized", "consume"):
        buffer = prefetch.make("device", sampler)
        filled = buffer.extend(new := buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
        states = [buffer.sample(filled, KEY)[0], filled, new]
        together = jax.vmap(buffer.sample)(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)
        of_one = jax.vmap(lambda key, buffer=buffer, state=filled: buffer.sample(state, key))(keys)
        for i, state in enumerate(states):
            same(buffer.sample(state, keys[i]), jax.tree.map(lambda x, i=i: x[i], together))
            same(buffer.sample(filled, keys[i]), jax.tree.map(lambda x, i=i: x[i], of_one))
    buffer = prefetch.make("compressed")
    state = buffer.extend(buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
    assert jax.vmap(lambda key: buffer.peek(state, key).mask)(keys).all()
    raises(TypeError, "cannot be vmapped", lambda: jax.vmap(lambda key: buffer.sample(state, key)[1])(keys))


@pytest.mark.exhaustive
def test_no_two_leaves_share_an_array():
    for storage in ("deduplicated", "compressed"):
        buffer = prefetch.make(storage, view="sequence")
        state = buffer.init(prefetch.EXAMPLE)
        for now in (state, buffer.sample(buffer.extend(state, prefetch.rows_at(0)), KEY)[0]):
            pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(now) if leaf.size]
            assert len(set(pointers)) == len(pointers)


@pytest.mark.exhaustive
def test_grow_and_set_keep_the_pending_batch():
    buffer = prefetch.make("deduplicated", "prioritized")
    state = buffer.sample(buffer.extend(buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0)), KEY)[0]
    larger, grown = buffer.grow(buffer.set(state, alpha=0.9))
    same(larger.sample(grown, jax.random.key(1))[1], buffer.sample(state, jax.random.key(1))[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("storage", ["device", "host"])
def test_plan_and_nbytes_count_the_pending_batch(storage):
    buffer, plain = prefetch.make(storage, view="transition"), prefetch.make(storage, view="transition", prefetch=0)
    stacks = 2 * prefetch.BATCH * 4 * 64
    state = buffer.init(prefetch.EXAMPLE)
    plan, before = buffer.plan(prefetch.EXAMPLE), plain.plan(prefetch.EXAMPLE)
    assert plan.device == buffer.nbytes(state)["device"]
    if storage == "device":
        assert plan.device - before.device > stacks and plan.host == 0
        return
    assert plan.host - before.host == 2 * stacks
    empty = buffer.nbytes(state)["host"]
    for i in range(4):
        state = buffer.extend(state, prefetch.rows_at(i))
        state, batch = buffer.sample(state, jax.random.key(i))
    jax.block_until_ready(batch)
    prefetch.wait_for_reads(store_of(state))
    grown = buffer.nbytes(state)["host"] - empty
    assert 2 * stacks < grown <= 2 * stacks + 40 * 64


@pytest.mark.exhaustive
def test_other_platforms(monkeypatch):
    trace_for_accelerators(monkeypatch)
    jax.clear_caches()
    try:
        prefetch.check_batches("compressed", "epoch", "row", "donated")
    finally:
        monkeypatch.undo()
        jax.clear_caches()
