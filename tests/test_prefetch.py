"""`Buffer(prefetch=1)`: each `sample` hands out the batch drawn by the one before.

The oracle is a buffer without prefetch on the device, which goes through the same history and is asked for the same draws at
the moment they are made. What becomes of a request to a host store must not matter: dropped, failed, never begun, begun and
not done; the tests of that work on the store, and then on a buffer over it. That the step goes on while the host decodes is
shown by a codec that waits until the step is done.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import export, lax

import fbuf
from fbuf import _ahead
from fbuf._host import ahead, owner
from fbuf._host.store import Column, Store, StoreClosed
from fbuf.samplers import Consume, Epoch, Prioritized, Uniform
from fbuf.storages import Blocks, Compressed, Deduplicated, Device, Host, Zstd
from fbuf.testing import assert_inplace
from fbuf.views import Hindsight, Row, Sequence, Transition

LANES, ROWS, BATCH, STEPS = 2, 5, 6, 8
STORAGES = {
    "device": Device(),
    "deduplicated": Deduplicated(keys=("obs",), blocks=512),
    "host": Host(keys=("obs",)),
    "compressed": Compressed(keys=("obs", "t")),
    "blocks": Compressed(keys=("obs",), codec=Blocks()),
}
HOSTED = ("host", "compressed", "blocks")
SAMPLERS = {"uniform": Uniform(), "prioritized": Prioritized(), "epoch": Epoch(), "consume": Consume(2)}
VIEWS = {
    "row": Row(),
    "transition": Transition(n_step=3, stack=4),
    "sequence": Sequence(4),
    "hindsight": Hindsight(
        Transition(n_step=2), lambda a, b: (a == b).astype(jnp.float32), goal="action", achieved="t", fraction=0.5
    ),
}
FORMS = ("eager", "jit", "donated", "scan")
EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((8, 8), np.uint8),
    "t": jax.ShapeDtypeStruct((), np.int32),
    "action": jax.ShapeDtypeStruct((), np.int32),
    "reward": jax.ShapeDtypeStruct((), np.float32),
    "terminated": jax.ShapeDtypeStruct((), np.bool_),
    "truncated": jax.ShapeDtypeStruct((), np.bool_),
}


def rows_at(step: int, count: int = ROWS) -> dict[str, np.ndarray]:
    """Rows that say when they came: `t` counts them, and is in the observation."""
    rng, shape = np.random.default_rng(step), (count, LANES)
    t = (step * count * LANES + np.arange(count * LANES, dtype=np.int32)).reshape(shape)
    return {
        "obs": (t[..., None, None] % 251).astype(np.uint8) * np.ones((8, 8), np.uint8),
        "t": t,
        "action": rng.integers(0, 9, shape).astype(np.int32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.1,
        "truncated": rng.random(shape) < 0.1,
    }


def make(storage: str = "device", sampler: str = "uniform", view: str = "row", prefetch: int = 1) -> fbuf.Buffer:
    return fbuf.Buffer(
        40,
        storage=STORAGES[storage],
        sampler=SAMPLERS[sampler],
        view=VIEWS[view],
        lanes=LANES,
        prefetch=prefetch,
        batch_size=BATCH,
    )


def seen(batch: fbuf.Sample) -> Any:
    """All of a batch but tickets' numbers, which differ from storage to storage in nothing here."""
    return jax.device_get(batch)


def assert_same(one: Any, two: Any) -> None:
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), seen(one), seen(two))
    assert all(jax.tree.leaves(same)), same


def store_of(state: Any) -> Store:
    return owner.find(owner.join_id(np.asarray(state.rows.id)))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fbuf-read-ahead"]


def own_thread(store: Store) -> threading.Thread:
    thread = store._ahead._thread
    assert thread is not None
    return thread


def eventually(condition: Callable[[], bool]) -> bool:
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


def settle(store: Store) -> None:
    """Waits until nothing is being read ahead."""
    assert eventually(lambda: all(r.done.is_set() for r in store._ahead._requests.values()))


# ----------------------------------------------------------------------------------------------- the same batches


class Oracle:
    """What the batches must be, from a buffer that draws what it hands out."""

    def __init__(self, buffer: fbuf.Buffer):
        self.buffer = dataclasses.replace(buffer, prefetch=0, storage=Device())
        self.state = self.buffer.init(EXAMPLE)
        self.pending: Any = None

    def sample(self, key: jax.Array) -> fbuf.Sample:
        if self.pending is None or not self.pending.mask.any():
            self.state, self.pending = self.buffer.sample(self.state, jax.random.fold_in(key, 1))
        batch = self.pending
        self.state, self.pending = self.buffer.sample(self.state, key)
        return batch


def errors_at(step: int) -> np.ndarray:
    return np.random.default_rng(1000 + step).random(BATCH).astype(np.float32)


@functools.cache
def expected(sampler: str, view: str) -> list[Any]:
    oracle, out = Oracle(make("device", sampler, view)), []
    for i in range(STEPS):
        if i:  # the first is asked of an empty buffer
            oracle.state = oracle.buffer.extend(oracle.state, rows_at(i))
        batch = oracle.sample(jax.random.key(i))
        if oracle.buffer.sampler.prioritized:
            oracle.state = oracle.buffer.update_priority(oracle.state, batch.index, errors_at(i))
        out.append(seen(batch))
    return out


def drawn(storage: str, sampler: str, view: str, form: str) -> list[Any]:
    buffer = make(storage, sampler, view)

    def step(state: Any, given: Any) -> Any:
        rows, key, error, first = given
        state = buffer.extend(state, rows, mask=jnp.broadcast_to(~first, (ROWS, LANES)))
        state, batch = buffer.sample(state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, error)
        return state, batch

    state = buffer.init(EXAMPLE)
    steps = [(rows_at(i), jax.random.key_data(jax.random.key(i)), errors_at(i), np.bool_(i == 0)) for i in range(STEPS)]
    if form == "scan":
        together = jax.tree.map(lambda *x: np.stack(x), *steps)
        state, batches = jax.jit(lambda s, g: lax.scan(step, s, g), donate_argnums=0)(state, together)
        return [jax.tree.map(lambda x, i=i: x[i], jax.device_get(batches)) for i in range(STEPS)]
    if form != "eager":
        step = jax.jit(step, donate_argnums=0 if form == "donated" else ())
    out = []
    for given_now in steps:
        state, batch = step(state, given_now)
        out.append(seen(batch))
    return out


DEFAULT = [  # of two oracles: what costs time is compiling
    ("device", "prioritized", "transition", "scan"),
    ("compressed", "prioritized", "transition", "donated"),
    ("deduplicated", "epoch", "row", "donated"),
    ("host", "epoch", "row", "jit"),
    ("blocks", "epoch", "row", "eager"),
]


@pytest.mark.parametrize(
    ("storage", "sampler", "view", "form"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
        for case in (
            (storage, sampler, view, form)
            for storage in STORAGES
            for sampler in SAMPLERS
            for view in VIEWS
            for form in FORMS
        )
    ],
)
def test_batches_are_those_of_the_step_before(storage: str, sampler: str, view: str, form: str) -> None:
    wanted = expected(sampler, view)
    assert not wanted[0].mask.any() and sum(int(batch.mask.sum()) for batch in wanted) > 3 * BATCH
    found = drawn(storage, sampler, view, form)
    for one, two in zip(wanted, found, strict=True):
        assert_same(one, two)


def test_the_batch_is_what_peek_gave_at_the_draw() -> None:
    buffer = make("compressed", "prioritized")
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    key, other = jax.random.split(jax.random.key(0))
    first, later = buffer.peek(state, jax.random.fold_in(key, 1)), buffer.peek(state, key, beta=0.9)
    state, batch = buffer.sample(state, key, beta=0.9)
    np.testing.assert_array_equal(batch.index.slot, first.index.slot)  # weights differ by beta
    state = buffer.update_priority(state, batch.index, np.full(BATCH, 9.0, np.float32))
    state = buffer.extend(state, rows_at(1))
    assert_same(buffer.sample(state, other)[1], later)


def test_without_prefetch_nothing_changes() -> None:
    plain, sized = fbuf.Buffer(10), fbuf.Buffer(10, batch_size=4)
    states = [b.extend(b.init({"x": 0.0}), {"x": jnp.arange(5.0)}) for b in (plain, sized)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert states[0].ahead is None and "stale_draws" not in plain.stats(states[0])
    assert_same(plain.sample(states[0], jax.random.key(0), 4)[1], sized.sample(states[1], jax.random.key(0))[1])
    assert sized.sample(states[1], jax.random.key(0), 7)[1].mask.shape == (7,)


# ------------------------------------------------------------------------------------------------- what goes stale


@pytest.mark.parametrize("storage", ["device", "compressed", pytest.param("host", marks=pytest.mark.slow)])
def test_rows_that_go_are_handed_out_as_drawn_and_refused_afterwards(storage: str) -> None:
    buffer = make(storage, "prioritized")
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0, 20))  # full
    state, _ = buffer.sample(state, jax.random.key(0))
    then = buffer.peek(state, jax.random.key(0))
    assert_same(then, buffer.peek(state, jax.random.key(0)))
    state = buffer.extend(state, rows_at(1, 20))  # every row is another
    tree = np.asarray(state.sampler.tree)
    state, batch = buffer.sample(state, jax.random.key(1))
    assert_same(batch, then)
    assert batch.mask.all() and (batch.data["t"] < 40).all()
    np.testing.assert_array_equal(batch.data["obs"][:, 0, 0], batch.data["t"] % 251)
    assert int(buffer.stats(state)["stale_draws"]) == BATCH
    assert not buffer.get(state, batch.index).mask.any()
    state = buffer.update_priority(state, batch.index, np.full(BATCH, 50.0, np.float32))
    state = buffer.update_rows(state, batch.index, {"reward": np.full(BATCH, 50.0, np.float32)})
    np.testing.assert_array_equal(tree, state.sampler.tree)
    assert int(buffer.stats(state)["refused_stale"]) == 2 * BATCH
    assert (buffer.rows(state).data["reward"] < 50).all()
    state, batch = buffer.sample(state, jax.random.key(2))
    assert (batch.data["t"] >= 40).all() and int(buffer.stats(state)["stale_draws"]) == BATCH


@pytest.mark.parametrize("storage", ["device", "compressed"])
def test_changed_rows_are_handed_out_as_drawn(storage: str) -> None:
    buffer = make(storage)
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    state, _ = buffer.sample(state, jax.random.key(0))
    every = buffer.rows(state)
    count = every.mask.size
    index = jax.tree.map(lambda x: x.reshape(-1), every.index)
    state = buffer.update_rows(
        state, index, {"obs": np.full((count, 8, 8), 255, np.uint8), "action": np.full(count, 77)}
    )
    state, batch = buffer.sample(state, jax.random.key(1))
    assert (batch.data["obs"] < 255).all() and (batch.data["action"] < 77).all()
    state, batch = buffer.sample(state, jax.random.key(2))
    assert (batch.data["obs"] == 255).all() and (batch.data["action"] == 77).all()
    assert int(buffer.stats(state)["stale_draws"]) == 0


@pytest.mark.parametrize(
    "storage", ["device", "compressed", *(pytest.param(s, marks=pytest.mark.slow) for s in ("deduplicated", "host"))]
)
def test_clear_drops_what_is_pending(storage: str) -> None:
    buffer = make(storage)
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    state, _ = buffer.sample(state, jax.random.key(0))
    state = buffer.clear(state)
    state, batch = buffer.sample(state, jax.random.key(1))
    assert not batch.mask.any() and int(buffer.stats(state)["empty_samples"]) == 1
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(batch.data))
    state = buffer.extend(state, rows_at(5))
    now = buffer.peek(state, jax.random.fold_in(jax.random.key(2), 1))
    state, batch = buffer.sample(state, jax.random.key(2))
    assert_same(batch, now)
    assert batch.mask.all() and (batch.data["t"] >= 50).all()
    assert int(buffer.stats(state)["empty_samples"]) == 1 and int(buffer.stats(state)["stale_draws"]) == 0


# --------------------------------------------------------------------------------------------- states are values


@pytest.mark.parametrize("storage", [pytest.param("device", marks=pytest.mark.slow), "host", "compressed"])
def test_a_state_sampled_twice_gives_one_batch(storage: str) -> None:
    buffer = make(storage)
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    state, _ = buffer.sample(state, jax.random.key(0))
    one = buffer.sample(state, jax.random.key(1))
    two = buffer.sample(state, jax.random.key(1))
    assert_same(one[1], two[1])
    for key in range(2, 6):  # its request is dropped by now
        one = buffer.sample(one[0], jax.random.key(key))
    again = buffer.sample(state, jax.random.key(1))
    assert_same(again[1], two[1])
    assert_same(buffer.sample(again[0], jax.random.key(9))[1], buffer.sample(two[0], jax.random.key(9))[1])


@pytest.mark.parametrize("storage", ["host", "compressed"])
def test_futures_do_not_meet(storage: str) -> None:
    """Several futures of one state, taken in turns, each like one that is alone."""
    buffer = make(storage)

    def steps(state: Any, name: int) -> Iterator[Any]:
        for i in range(4):
            state = buffer.extend(state, rows_at(10 * name + i, 2))
            state, batch = buffer.sample(state, jax.random.key(10 * name + i))
            yield seen(batch)

    def start() -> Any:
        state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
        return buffer.sample(state, jax.random.key(0))[0]

    alone = [list(steps(start(), name)) for name in (1, 2, 3)]
    state = start()
    together = list(zip(*(steps(state, name) for name in (1, 2, 3)), strict=True))
    for name, batches in enumerate(alone):
        for i, batch in enumerate(batches):
            assert_same(batch, together[i][name])


def test_states_under_vmap_draw_for_themselves() -> None:
    """One has a batch, one has none and rows, one has nothing."""
    for sampler in ("prioritized", "consume"):
        buffer = make("device", sampler)
        new = buffer.init(EXAMPLE)
        filled = buffer.extend(new, rows_at(0))
        ahead_of = buffer.sample(filled, jax.random.key(7))[0]
        states = [ahead_of, filled, new]
        keys = jax.random.split(jax.random.key(1), 3)
        together = jax.vmap(buffer.sample)(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)
        for i, state in enumerate(states):
            assert_same(buffer.sample(state, keys[i]), jax.tree.map(lambda x, i=i: x[i], together))


def test_many_keys_of_one_state() -> None:
    """On the device; a request to a host store is none that can be mapped."""
    buffer = make("device", "consume")
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    keys = jax.random.split(jax.random.key(1), 3)
    together = jax.vmap(lambda key: buffer.sample(state, key))(keys)
    for i, key in enumerate(keys):
        assert_same(buffer.sample(state, key), jax.tree.map(lambda x, i=i: x[i], together))
    buffer = make("compressed")
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    assert jax.vmap(lambda key: buffer.peek(state, key).mask)(keys).all()
    with pytest.raises(TypeError, match="cannot be vmapped"):
        jax.vmap(lambda key: buffer.sample(state, key)[1])(keys)


def test_no_two_leaves_share_an_array() -> None:
    for storage in ("deduplicated", "compressed"):
        buffer = make(storage, view="sequence")
        state = buffer.init(EXAMPLE)
        for state_now in (state, buffer.sample(buffer.extend(state, rows_at(0)), jax.random.key(0))[0]):
            pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state_now) if leaf.size]
            assert len(set(pointers)) == len(pointers)


def test_a_step_can_be_exported() -> None:
    buffer = make("device")
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    key = np.array([0, 1], np.uint32)
    exported = export.export(jax.jit(buffer.sample))(state, key)
    again = export.deserialize(exported.serialize())
    assert_same(again.call(state, key), buffer.sample(state, key))


# ------------------------------------------------------------------------------------------------- in place

LARGE = {**EXAMPLE, "obs": jax.ShapeDtypeStruct((4, 3), np.uint8)}


@pytest.mark.parametrize(
    ("storage", "sampler", "view", "order"),
    [
        ("device", "prioritized", "transition", "sesu"),
        ("compressed", "consume", "row", "ses"),
        pytest.param("deduplicated", "epoch", "sequence", "esr", marks=pytest.mark.slow),
        pytest.param("device", "consume", "row", "esr", marks=pytest.mark.slow),
        pytest.param("device", "uniform", "transition", "se", marks=pytest.mark.slow),
        pytest.param("compressed", "prioritized", "transition", "sesu", marks=pytest.mark.slow),
    ],
)
def test_a_donated_step_copies_nothing(storage: str, sampler: str, view: str, order: str) -> None:
    storages = {**STORAGES, "deduplicated": Deduplicated(keys=("obs",), blocks=2**19)}
    buffer = dataclasses.replace(make("device", sampler, view), capacity=400_000, storage=storages[storage])
    spec = buffer.checked_spec("test", LARGE)
    rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(LARGE))
    state = jax.eval_shape(functools.partial(_ahead.empty_state, buffer), rows)

    def step(state: Any, given: Any) -> Any:
        rows, key, error = given
        index, out = None, []
        for verb in order:
            if verb == "e":
                state = buffer.extend(state, rows)
            elif verb == "s":
                state, batch = buffer.sample(state, key)
                index = batch.index
                out.append(batch)
            elif verb == "u":
                state = buffer.update_priority(state, index, error)
            else:
                state = buffer.update_rows(state, index, {"reward": error})
        return state, out

    def shaped(*axes: int) -> Any:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, 3, LANES, *x.shape), x.dtype), LARGE)
        return rows, jax.ShapeDtypeStruct((*axes, 2), np.uint32), jax.ShapeDtypeStruct((*axes, BATCH), np.float32)

    assert_inplace(step, state, shaped())
    assert_inplace(lambda state, given: lax.scan(step, state, given), state, shaped(3))


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_an_eager_sample_copies_what_was_drawn_and_no_more(sampler: str) -> None:
    buffer = make("device", sampler)
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    after, _ = buffer.sample(state, jax.random.key(0))
    kept = jax.tree.map(
        lambda a, b: a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer(),
        (state.rows, state.ring, state.sampler),
        (after.rows, after.ring, after.sampler),
    )
    assert all(jax.tree.leaves(kept))


# --------------------------------------------------------------------------------------------------- other verbs


def test_convert_to_and_from_prefetch() -> None:
    buffer = make("compressed", "uniform")
    other = dataclasses.replace(buffer, sampler=Prioritized(), batch_size=3)
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    converted = buffer.convert(other, state)
    now = other.peek(converted, jax.random.fold_in(jax.random.key(1), 1))
    converted, batch = other.sample(converted, jax.random.key(1))
    assert_same(batch, now)
    plain = dataclasses.replace(other, prefetch=0)
    assert other.convert(plain, converted).ahead is None
    with pytest.raises(ValueError, match=r"prefetch or batch_size.*buffer\.convert\(other, state\)"):
        plain.sample(converted, jax.random.key(0))
    with pytest.raises(ValueError, match="made by another buffer"):
        buffer.sample(converted, jax.random.key(0))
    with pytest.raises(ValueError, match="made by another buffer"):
        dataclasses.replace(other, batch_size=4).sample(converted, jax.random.key(0))


def test_grow_and_set_keep_what_is_pending() -> None:
    buffer = make("deduplicated", "prioritized")
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    then = buffer.peek(state, jax.random.key(0))
    larger, state = buffer.grow(buffer.set(state, alpha=0.9))
    state, batch = larger.sample(state, jax.random.key(1))
    assert_same(batch, then)


@pytest.mark.parametrize("storage", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_plan_and_nbytes_count_what_is_pending(storage: str) -> None:
    buffer, plain = make(storage, view="transition"), make(storage, view="transition", prefetch=0)
    stacks = 2 * BATCH * 4 * 64
    state = buffer.init(EXAMPLE)
    plan, before = buffer.plan(EXAMPLE), plain.plan(EXAMPLE)
    assert plan.device == buffer.nbytes(state)["device"]
    if storage == "device":
        assert plan.device - before.device > stacks and plan.host == 0
        return
    assert plan.host - before.host == 2 * stacks
    empty = buffer.nbytes(state)["host"]
    for i in range(4):
        state = buffer.extend(state, rows_at(i))
        state, batch = buffer.sample(state, jax.random.key(i))
    jax.block_until_ready(batch)
    settle(store_of(state))
    grown = buffer.nbytes(state)["host"] - empty
    assert 2 * stacks < grown <= 2 * stacks + 40 * 64


@pytest.mark.parametrize("to", ["jax", "numpy", "torch"])
def test_replay(to: str) -> None:
    if to == "torch":
        pytest.importorskip("torch")
    replay = fbuf.Replay(make("compressed", "prioritized"), EXAMPLE, seed=0)
    with pytest.raises(ValueError, match="nothing to draw"):
        replay.sample(to=to)
    for i in range(12):  # goes round more than twice: some indices go stale, and nothing raises
        replay.extend(rows_at(i))
        batch = replay.sample(to=to)
        assert (np.asarray(batch.data["obs"])[:, 0, 0] == np.asarray(batch.data["t"]) % 251).all()
        replay.update_priority(batch.index, errors_at(i))
    stats = replay.stats()
    assert stats["stale_draws"] > 0 and stats["refused_stale"] == stats["stale_draws"]
    assert replay.nbytes()["host"] > 0


def test_checked_lets_stale_draws_pass() -> None:
    buffer = make("device", "prioritized")
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0, 20)), jax.random.key(0))[0]
    state, batch = buffer.sample(buffer.extend(state, rows_at(1, 20)), jax.random.key(1))
    update = fbuf.checked(buffer.update_priority)
    state = update(state, batch.index, np.ones(BATCH, np.float32))
    assert int(buffer.stats(state)["refused_stale"]) == BATCH
    with pytest.raises(ValueError, match="nonfinite"):
        update(state, batch.index, np.full(BATCH, np.nan, np.float32))


@pytest.mark.parametrize(
    ("make_it", "kind", "message"),
    [
        (lambda: fbuf.Buffer(10, prefetch=2, batch_size=4), ValueError, r"prefetch is 2; expected 0, or 1"),
        (lambda: fbuf.Buffer(10, prefetch=True, batch_size=4), ValueError, "prefetch is True"),
        (
            lambda: fbuf.Buffer(10, prefetch=1),
            ValueError,
            r"batch_size is None.*Buffer\(\.\.\., prefetch=1, batch_size=",
        ),
        (lambda: fbuf.Buffer(10, prefetch=1, batch_size=0), ValueError, "batch_size is 0; expected an int >= 1"),
        (lambda: fbuf.Buffer(10, prefetch=1, batch_size=4.0), TypeError, "batch_size is float"),
    ],
)
def test_settings_that_cannot_be(make_it: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make_it()


def test_another_batch_size_is_refused() -> None:
    buffer = make()
    state = buffer.init(EXAMPLE)
    with pytest.raises(
        ValueError, match=r"batch_size is 7, but the state holds a batch of 6 drawn ahead.*batch_size=7"
    ):
        buffer.sample(state, jax.random.key(0), 7)
    assert buffer.sample(state, jax.random.key(0), BATCH)[1].mask.shape == (BATCH,)
    assert buffer.peek(state, jax.random.key(0), 7).mask.shape == (7,)
    with pytest.raises(TypeError, match=r"given neither here nor to Buffer\(batch_size="):
        fbuf.Buffer(10).sample(fbuf.Buffer(10).init({"x": 0.0}), jax.random.key(0))


# ------------------------------------------------------------------------------------------------------ the store


class Gate:
    """What the codec below asks before it decodes; hashes as one value."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fails: Callable[[], bool] = lambda: False


GATE = Gate()


@pytest.fixture(autouse=True)
def gate() -> Iterator[Gate]:
    GATE.__init__()
    yield GATE
    GATE.open.set()


@dataclasses.dataclass(frozen=True)
class Gated:
    """Deflate, which waits at a gate in the store's thread, and fails when told to."""

    chunk: int = 4

    def encode(self, rows: np.ndarray) -> bytes:
        return zlib.compress(rows.tobytes())

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        if threading.current_thread().name == "fbuf-read-ahead":
            GATE.entered.set()
            assert GATE.open.wait(30)
        if GATE.fails():
            raise OSError("no such luck")
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


STORAGES["gated"] = Compressed(keys=("obs",), codec=Gated())


def store(codec: Any = None, length: int = 16, slack: int = 4) -> Store:
    codec = Gated() if codec is None else codec
    columns = (Column("a", (5,), np.dtype(np.uint8), codec), Column("b", (), np.dtype(np.int32), None))
    return Store(columns, lanes=1, length=length, slack=slack)


def write(to: Store, first: int, count: int) -> np.ndarray:
    t = np.arange(first, first + count, dtype=np.int32)[:, None]
    return to.write([(t[..., None] + np.arange(5)).astype(np.uint8), t], None)[:, 0]


def wanted(tickets: np.ndarray) -> list[Any]:
    rubbish = np.full((len(tickets), 5), 171, np.uint8), np.full(len(tickets), 171, np.int32)
    return [(0, tickets, rubbish[0]), (1, tickets, rubbish[1])]


def ask(of: Store, tickets: np.ndarray) -> int:
    return of.request([(0, tickets), (1, tickets)])


def check(requests: list[Any], ok: np.ndarray, first: int) -> None:
    t = first + np.arange(len(requests[1][2]), dtype=np.int32)
    np.testing.assert_array_equal(requests[0][2], (t[:, None] + np.arange(5)).astype(np.uint8))
    np.testing.assert_array_equal(requests[1][2], t)
    assert ok.all()


def test_a_request_is_read_by_the_thread_and_collected_often() -> None:
    s = store()
    tickets = write(s, 0, 12)
    number = ask(s, tickets)
    settle(s)
    GATE.fails = lambda: True  # what is there needs no decoding
    for _ in range(2):
        requests = wanted(tickets)
        check(requests, s.collect(number, requests), 0)
    with pytest.raises(OSError):  # other tickets under this number
        s.collect(number, wanted(tickets[::-1].copy()))
    with pytest.raises(OSError):
        s.collect(number + 1, wanted(tickets))
    GATE.fails = lambda: False
    requests = wanted(tickets[3:7])
    check(requests, s.collect(number, requests), 3)


def test_compressed_rows_may_expire_while_they_are_read() -> None:
    s = store(slack=0)
    tickets = write(s, 0, 16)
    GATE.open.clear()
    number = s.request([(0, tickets)])
    assert GATE.entered.wait(10)
    write(s, 100, 40)  # all are gone
    GATE.open.set()
    out = np.zeros((16, 5), np.uint8)
    assert s.collect(number, [(0, tickets, out)]).all()
    np.testing.assert_array_equal(out, np.arange(16, dtype=np.uint8)[:, None] + np.arange(5, dtype=np.uint8))
    assert not s.read([(0, tickets, out)]).any() and not out.any()


def test_a_write_does_not_wait_for_what_it_leaves_alone() -> None:
    s = store(slack=4)
    tickets = write(s, 0, 16)
    GATE.open.clear()
    number = ask(s, tickets)
    assert GATE.entered.wait(10)
    write(s, 16, 4)  # the ring beside the chunks has room
    assert own_thread(s).is_alive() and not s._ahead._requests[number].done.is_set()
    GATE.open.set()
    requests = wanted(tickets)
    check(requests, s.collect(number, requests), 0)


@pytest.mark.parametrize("codec", [None, Zstd(chunk=2), Blocks(chunk=2)])
def test_a_write_waits_for_what_it_would_overwrite(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thread has begun or not."""
    s = store(codec, slack=0)
    for begun in (True, False):
        if not begun:
            monkeypatch.setattr(ahead.ReadAhead, "_runs", lambda self: False)
        tickets = write(s, 0, 16)
        number = ask(s, tickets)
        write(s, 100, 16)
        requests = wanted(tickets)
        check(requests, s.collect(number, requests), 0)


def test_a_write_of_one_row_reads_what_was_asked_for_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.ReadAhead, "_runs", lambda self: False)
    s = store(slack=0)
    tickets = write(s, 0, 16)
    number = ask(s, tickets[:3])
    write(s, 100, 1)
    requests = wanted(tickets[:3])
    check(requests, s.collect(number, requests), 0)


def test_only_the_last_requests_are_kept_and_their_arrays_are_used_again() -> None:
    s = store()
    tickets = write(s, 0, 12)
    empty = s.nbytes
    numbers = []
    for _ in range(6):
        numbers.append(ask(s, tickets))
        settle(s)
        requests = wanted(tickets)
        check(requests, s.collect(numbers[-1], requests), 0)
        held = list(s._ahead._requests.values())
        assert len(held) <= 2
    assert s.nbytes - empty == 2 * (12 * 5 + 12 * 4)
    arrays = {id(out) for r in held for out in r.outs}
    ask(s, tickets)
    settle(s)
    assert {id(out) for r in s._ahead._requests.values() for out in r.outs} == arrays
    requests = wanted(tickets)
    check(requests, s.collect(numbers[0], requests), 0)  # dropped: read now


def test_what_the_thread_has_not_begun_is_read_by_who_wants_it() -> None:
    s = store()
    tickets = write(s, 0, 12)
    GATE.open.clear()
    ask(s, tickets)
    assert GATE.entered.wait(10)
    second = ask(s, tickets[:4])  # behind the first
    requests = wanted(tickets[:4])
    check(requests, s.collect(second, requests), 0)  # at once, with the gate closed
    check(requests, s.collect(second, requests), 0)
    GATE.open.set()


def test_no_thread_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    s = store()
    tickets = write(s, 0, 12)
    monkeypatch.setattr(ahead.threading.Thread, "start", fail)
    number = ask(s, tickets)
    requests = wanted(tickets)
    check(requests, s.collect(number, requests), 0)
    monkeypatch.undo()
    number = ask(s, tickets)
    settle(s)
    assert own_thread(s).is_alive()


def test_the_nth_decoding_fails() -> None:
    """In the thread: it is done again. Then too: the error is raised, and the store is as before."""
    for n in range(5):
        s = store()
        tickets = write(s, 0, 12)
        before = {name: np.asarray(array).tobytes() for name, array in s.to_arrays().items()}
        for times in (1, 99):
            calls = iter(range(100))
            GATE.fails = lambda calls=calls, n=n, times=times: n <= next(calls) < n + times
            number = ask(s, tickets)
            settle(s)
            requests = wanted(tickets)
            if times == 1 or n > 2:  # three chunks; after those nothing is decoded again
                check(requests, s.collect(number, requests), 0)
            else:
                with pytest.raises(OSError, match="no such luck"):
                    s.collect(number, requests)
            GATE.fails = lambda: False
            check(requests, s.read(requests), 0)
        assert before == {name: np.asarray(array).tobytes() for name, array in s.to_arrays().items()}
        s.close()


def test_no_memory_for_what_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    s = store()
    tickets = write(s, 0, 12)
    monkeypatch.setattr(ahead.np, "empty", fail)
    number = ask(s, tickets)
    settle(s)
    monkeypatch.undo()
    requests = wanted(tickets)
    check(requests, s.collect(number, requests), 0)


def test_a_closed_store_says_so() -> None:
    s = store()
    tickets = write(s, 0, 12)
    number = ask(s, tickets)
    s.close()
    s.close()
    with pytest.raises(StoreClosed):
        s.collect(number, wanted(tickets))
    with pytest.raises(StoreClosed):
        ask(s, tickets)
    assert eventually(lambda: not own_thread(s).is_alive())


def test_the_thread_keeps_no_store_alive() -> None:
    s = store()
    tickets = write(s, 0, 12)
    GATE.open.clear()
    ask(s, tickets)
    assert GATE.entered.wait(10)
    ask(s, tickets)
    ref, thread = weakref.ref(s), own_thread(s)
    del s
    GATE.open.set()
    assert eventually(lambda: ref() is None and not thread.is_alive())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_child_reads_for_itself() -> None:
    script = """
import os, sys, warnings
import numpy as np
from fbuf._host.store import Column, Store
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("pending", [False, True])
def test_the_interpreter_ends_with_reads_under_way(pending: bool) -> None:
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


PROGRAM = st.lists(st.tuples(st.sampled_from("wwrrcpd"), st.integers(0, 2**16)), min_size=1, max_size=25)


@pytest.mark.parametrize("codec", [Zstd(chunk=4), Blocks(chunk=1), Gated()])
@example(program=[("w", 0), ("r", 0), ("c", 0), ("w", 0), ("c", 0)])  # asked for again when the rows are gone
@given(program=PROGRAM)
def test_what_is_collected_is_what_was_there_when_it_was_asked_for(codec: Any, program: list[tuple[str, int]]) -> None:
    """Writes, requests, collections and changed rows in any order, against what `read` gave at the request."""
    s = store(codec, length=8, slack=2)
    tickets, asked, rows = np.zeros(1, np.uint64), [], 0
    for verb, seed in program:
        rng = np.random.default_rng(seed)
        if verb == "w":
            count = int(rng.integers(1, 7))
            tickets = np.concatenate([tickets, write(s, rows, count)])
            rows += count
        elif verb == "p":
            some = rng.choice(tickets[-8:], 3)
            new = s.patch(some, np.ones(3, bool), {0: rng.integers(0, 255, (3, 5), np.uint8)})
            tickets = np.concatenate([tickets, new])
        elif verb == "r":
            some = rng.choice(tickets[-14:], int(rng.integers(1, 10)))
            then = wanted(some)
            ok = s.read(then)
            asked.append((ask(s, some), some, then, ok))
        elif asked:
            number, some, then, ok = asked[-1 - int(rng.integers(0, min(2, len(asked))))]
            now = wanted(some)
            found = s.collect(number if verb == "c" else 0, now)
            now_there = s.read(wanted(some))
            whole = found == ok
            if verb == "c" and (number, some) == (asked[-1][0], some):
                assert whole.all()
            assert (whole | (found == now_there)).all()
            for one, two, there in zip(now, then, np.split(found, 2), strict=True):
                np.testing.assert_array_equal(one[2][there], two[2][there])
                assert not one[2][~there].any()
    s.close()


# ----------------------------------------------------------------------------------------- the store in a step


def filled(buffer: fbuf.Buffer) -> Any:
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0))
    return jax.block_until_ready(buffer.sample(state, jax.random.key(0))[0])


@pytest.mark.parametrize("form", ["eager", "donated"])
def test_a_step_ends_before_the_host_has_decoded(form: str) -> None:
    buffer = make("gated")
    step = buffer.sample if form == "eager" else jax.jit(buffer.sample, donate_argnums=0)
    state = filled(buffer)
    state, _ = jax.block_until_ready(step(state, jax.random.key(1)))  # compiled
    settle(store_of(state))
    then = seen(buffer.peek(state, jax.random.key(2)))
    GATE.open.clear()
    GATE.entered.clear()
    state, batch = jax.block_until_ready(step(state, jax.random.key(2)))
    total = jax.block_until_ready(jnp.sum(batch.data["t"], dtype=jnp.int32))  # so does what follows
    assert GATE.entered.wait(10)
    assert not all(r.done.is_set() for r in store_of(state)._ahead._requests.values())
    threading.Timer(0.2, GATE.open.set).start()
    state, late = step(state, jax.random.key(3))  # waits for the gate
    assert_same(late, then)
    assert int(total) >= 0


def test_a_failure_in_the_thread_does_not_show() -> None:
    buffer = make("gated")
    state = filled(buffer)
    then = seen(buffer.peek(state, jax.random.key(1)))
    settle(store_of(state))
    GATE.fails = lambda: threading.current_thread().name == "fbuf-read-ahead"
    state, _ = buffer.sample(state, jax.random.key(1))
    state, batch = buffer.sample(buffer.extend(state, rows_at(1)), jax.random.key(2))
    assert_same(batch, then)
    GATE.fails = lambda: True
    with pytest.raises((RuntimeError, ValueError), match="no such luck"):
        jax.block_until_ready(buffer.sample(state, jax.random.key(3))[1])
    GATE.fails = lambda: False
    assert buffer.sample(state, jax.random.key(3))[1].mask.all()


def test_a_request_that_fails_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make("compressed")
    state = filled(buffer)

    def fail(*_: Any) -> int:
        raise RuntimeError("no requests today")

    monkeypatch.setattr(Store, "request", fail)
    for i in range(3):
        then = seen(buffer.peek(state, jax.random.key(i)))
        state, _ = buffer.sample(state, jax.random.key(i))
        assert int(state.ahead.held.number) == 0
        state, batch = buffer.sample(state, jax.random.key(9))
        assert_same(batch, then)


def test_rows_that_expire_because_nothing_read_them_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = dataclasses.replace(make(), storage=Host(keys=("obs",), slack=0, on_expired="mask"))
    state = filled(buffer)
    monkeypatch.setattr(Store, "request", lambda *_: 0)
    state, _ = buffer.sample(state, jax.random.key(1))
    state = buffer.extend(state, rows_at(1, 20))
    state, batch = buffer.sample(state, jax.random.key(2))
    assert not batch.mask.any() and not np.asarray(batch.data["t"]).any() and not np.asarray(batch.weight).any()
    stats = buffer.stats(state)
    assert int(stats["expired_rows"]) == int(stats["stale_draws"]) == BATCH


def test_a_freed_store_says_so() -> None:
    buffer = make("compressed")
    state = filled(buffer)
    fbuf.stores()[-1].close()
    with pytest.raises((RuntimeError, ValueError), match="not open in this process"):
        jax.block_until_ready(buffer.sample(state, jax.random.key(1))[1])


def test_the_callbacks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no `buffer_callback`."""
    monkeypatch.setattr(jax, "default_backend", lambda: "elsewhere")
    jax.clear_caches()
    try:
        found = drawn("compressed", "epoch", "row", "donated")
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    for one, two in zip(expected("epoch", "row"), found, strict=True):
        assert_same(one, two)


def test_a_donated_step_is_pending_while_threads_sample_and_add() -> None:
    """Each with a buffer of its own, behind a computation that is late: nobody waits for anybody for ever."""
    buffer = make("compressed")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any, key: Any, slow: jax.Array) -> Any:
        slow = lax.fori_loop(0, 50, lambda i, a: jnp.tanh(a @ a), slow)
        key = key + (slow[0, 0] > jnp.float32(2)).astype(jnp.uint32)
        state = buffer.extend(state, rows)
        return buffer.sample(state, key)

    errors: list[BaseException] = []

    def work(name: int) -> None:
        try:
            state = buffer.init(EXAMPLE)
            for i in range(12):
                key = np.array([name, i], np.uint32)
                state, batch = step(state, rows_at(i), key, np.full((128, 128), 0.01, np.float32))
            t, obs = np.asarray(batch.data["t"]), np.asarray(batch.data["obs"])
            np.testing.assert_array_equal(obs[:, 0, 0], t % 251)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers) and not errors, errors


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("storage", ["host", "compressed"])
def test_many_steps_leave_memory_and_threads_as_they_are(storage: str) -> None:
    buffer = make(storage)
    step = jax.jit(lambda s, r, k: buffer.sample(buffer.extend(s, r), k), donate_argnums=0)
    state = buffer.init(EXAMPLE)
    rows = [rows_at(i) for i in range(8)]
    keys = [np.array([0, i], np.uint32) for i in range(8)]
    before, others = 0, len(threads())
    for i in range(1000):
        state, batch = step(state, rows[i % 8], keys[i % 8])
        if i == 300:
            jax.block_until_ready(batch)
            gc.collect()
            before = resident()
    assert len(threads()) <= others + 1
    jax.block_until_ready(batch)
    assert len(store_of(state)._ahead._requests) == 2
    gc.collect()
    assert resident() - before < 4 << 20
    del state, batch
    gc.collect()
    assert fbuf.stores() == [] and eventually(lambda: len(threads()) <= others)
