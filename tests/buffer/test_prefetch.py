"""`Buffer(prefetch=1)`: each `sample` returns the batch drawn by the one before."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._host.store.store import Store
from fbuf.storages import Host
from tests.support import refusals
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
    settle,
)
from tests.support.refusals import raises, raises_late
from tests.support.tables import checks
from tests.support.threads import PATIENCE, Thread
from tests.support.trees import same

test_sample_returns_the_batch_of_the_previous_call = checks(
    (check_batches, [("compressed", "prioritized", "row", "donated"), ("host", "epoch", "row", "jit")]),
    *((check, ["compressed"]) for check in CHECKS[:3]),
)


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
    assert replay.nbytes()["host"] > 0


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
    settle(store_of(state))
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
    settle(store_of(state))
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
