"""Priorities on the host: the numpy tree and its versions by themselves, and buffers that have them against those that do not.

The device's tree is the oracle: wherever priorities live, leaves, draws, probabilities and weights are the same bit for bit, in
any order of verbs, also of old states and of futures that parted. A state that is too old says so; what never happens is that
it draws by the priorities of another.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf import _descent, _sumtree
from fbuf._host import owner, priorities, sumtree
from fbuf._host.priorities import Priorities
from fbuf._host.sumtree import Layout, Tree
from fbuf.samplers import Prioritized, _hosttree
from fbuf.testing import assert_inplace
from tests import test_flags

EXPIRED = "the priorities of this BufferState have expired.*Carry on the state"


def layout_of(capacity: int) -> Layout:
    return Layout(*_sumtree.layout(capacity), _descent.middle(capacity))


# ------------------------------------------------------------------------------------------------- the numpy tree


def some_leaves(rng: np.random.Generator, number: int) -> np.ndarray:
    """Of many sizes, some of them 0."""
    leaf = rng.random(number) * 10.0 ** rng.integers(-12, 12, number)
    return np.where(rng.random(number) < 0.2, 0, leaf).astype(np.float32)


def sums_of(leaves: np.ndarray) -> list[np.ndarray]:
    """Every level by itself, in the order of additions that the device has."""
    levels = [leaves]
    while len(levels[-1]) > 1 or len(levels) == 1:
        below = levels[-1]
        c = np.pad(below, (0, -len(below) % 8)).reshape(-1, 8).T
        levels.append(((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])))
    return levels


@settings(max_examples=60)
@given(
    capacity=st.sampled_from([1, 2, 7, 8, 9, 64, 65, 513, 5000]),
    batches=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_a_tree_is_the_sum_of_its_leaves(capacity: int, batches: list[int], seed: int) -> None:
    rng, tree, oracle = np.random.default_rng(seed), Tree(layout_of(capacity), True), np.zeros(capacity, np.float32)
    for batch in batches:
        index, leaf, before = rng.integers(0, capacity, batch), some_leaves(rng, batch), oracle.copy()
        old = tree.exchange(index, leaf)
        for i, value in zip(index, leaf, strict=True):  # the last wins
            oracle[i] = value
        assert np.array_equal(old, before[index])
        assert np.array_equal(tree.leaves, oracle)
        for level, expected in zip(tree._level, sums_of(oracle)[1:], strict=True):
            assert np.array_equal(level, expected)
        positive = oracle[oracle > 0]
        total, least = tree.roots()
        assert total == sums_of(oracle)[-1][0]
        assert least == (positive.min() if positive.size else np.inf)
    assert not any(pad.any() for pad in padding(tree))


def padding(tree: Tree) -> list[np.ndarray]:
    counts, offsets, _ = tree.layout
    return [tree._nodes[offsets[i] + counts[i] : offsets[i + 1]] for i in range(len(counts))]


@functools.cache
def device_draw(capacity: int, stratified: bool) -> Any:
    def draw(tree: jax.Array, key: jax.Array) -> Any:
        top, bottom = _descent.uniforms(key, 300, stratified=stratified)
        return top, bottom, _descent.draw(tree, key, 300, capacity, stratified=stratified)

    return jax.jit(draw)


@pytest.mark.parametrize("capacity", [1, 9, 600, 70_000])
def test_draws_are_those_of_the_device(capacity: int) -> None:
    """Bit for bit, and in lots."""
    rng, tree = np.random.default_rng(capacity), Tree(layout_of(capacity), False)
    for stratified in (False, True) if capacity > 9 else (False,):
        for seed in range(6):
            tree.fill(some_leaves(rng, capacity) if seed else np.zeros(capacity, np.float32))
            drawn = device_draw(capacity, stratified)(jnp.asarray(tree._nodes), jax.random.key(seed))
            top, bottom, (index, leaf) = jax.tree.map(np.asarray, drawn)
            got = tree.draw(top, bottom)
            assert np.array_equal(got, index)
            assert np.array_equal(tree.leaves[got], leaf)
            assert (leaf > 0).all() or not tree.leaves.any()


def test_draws_in_lots_are_those_of_one() -> None:
    rng, tree = np.random.default_rng(0), Tree(layout_of(3000), False)
    tree.fill(some_leaves(rng, 3000))
    top, bottom = rng.random((2, 3 * sumtree._LOT + 5), np.float32)
    parts = [tree.draw(top[i : i + 1000], bottom[i : i + 1000]) for i in range(0, len(top), 1000)]
    assert np.array_equal(tree.draw(top, bottom), np.concatenate(parts))


def test_what_processors_take_for_zero_is_zero() -> None:
    leaf = np.array([np.nan, 1e-45, 2.0**-126, -1.0, -0.0, 1.0], np.float32)
    assert sumtree.normal(leaf).tolist() == [0, 0, 2.0**-126, 0, 0, 1]


# --------------------------------------------------------------------------------------------------- versions

STEPS = st.lists(st.tuples(st.sampled_from("wwwwrc"), st.integers(0, 11), st.integers(0, 2**16)), max_size=40)


def check(store: Priorities, version: int, expected: np.ndarray) -> None:
    assert np.array_equal(store.leaves(version), expected)
    top = np.random.default_rng(version).random(16, np.float32)
    index, leaf, mass, least = store.draw(version, top, top)
    fresh = Tree(store.layout, store.least)
    fresh.fill(expected)
    assert np.array_equal(index, fresh.draw(top, top)) and np.array_equal(leaf, expected[index])
    assert (mass, least) == fresh.roots()


@settings(max_examples=60)
@given(steps=STEPS, slack=st.sampled_from([0, 30, 10_000]))
def test_every_version_is_itself_or_has_expired(steps: list[tuple[str, int, int]], slack: int) -> None:
    """Writes, reads and clearings of versions far back, on a store that keeps much or little."""
    store = Priorities(layout_of(20), True)
    store._most = slack
    known = {store.first: np.zeros(20, np.float32)}
    asked = [store.first]
    for what, back, seed in steps:
        version, rng = sorted(known)[-1 - back % len(known)], np.random.default_rng(seed)
        number = int(rng.integers(0, 12))
        index, leaf = rng.integers(-3, 24, number).astype(np.int32), some_leaves(rng, number)
        try:
            if what == "r":
                check(store, version, known[version])
                made = version
            elif what == "c":
                made = store.clear(version)
                known[made] = np.zeros(20, np.float32)
            else:
                made = store.write(version, index, leaf)
                expected = known[version].copy()
                for i, value in zip(index, leaf, strict=True):
                    if 0 <= i < 20:
                        expected[i] = value
                if made == version:
                    assert not ((index >= 0) & (index < 20)).any()
                known[made] = expected
        except RuntimeError as error:
            assert "have expired" in str(error) and version not in asked[-2:] and slack < 10_000
            continue
        asked = [v for v in asked if v not in (version, made)] + [version] * (version != made) + [made]
        check(store, made, known[made])
        assert store.nbytes >= store._tree.nbytes and len(store._steps) <= 256
        assert store._kept == sum(step.size for step in store._steps.values() if step)
    for version in asked[-2:]:
        check(store, version, known[version])
    if slack == 10_000:
        for version, expected in known.items():
            check(store, version, expected)


def test_who_carries_on_never_expires_and_memory_is_flat() -> None:
    layout = layout_of(40_000)
    store, version, rng = Priorities(layout, True), 1, np.random.default_rng(0)
    for _ in range(600):
        version = store.write(version, rng.integers(0, 40_000, 64).astype(np.int32), some_leaves(rng, 64))
    assert store.nbytes <= priorities.most_bytes(layout, True)
    assert len(store._steps) < 90 and store._kept <= 5000
    check(store, version, store.leaves(version))
    with pytest.raises(RuntimeError, match=EXPIRED):
        store.leaves(store.first)
    assert isinstance(store.last_error, RuntimeError)
    for _ in range(600):
        version = store.write(version, np.zeros(1, np.int32), np.ones(1, np.float32))
    assert len(store._steps) == 256
    for _ in range(20):
        version = store.clear(version)
    assert store.nbytes <= 5 * store._tree.nbytes


def test_a_glance_at_an_old_version_does_not_lose_the_new_ones() -> None:
    store = Priorities(layout_of(64), False)
    store._most = 4
    versions = [store.first]
    for i in range(3):
        versions.append(store.write(versions[-1], np.array([i], np.int32), np.array([i + 1.0], np.float32)))
    newest = store.leaves(versions[-1])
    assert not store.leaves(store.first).any()
    more = np.array([9], np.int32), np.ones(1, np.float32)
    other = store.write(store.first, *more)
    assert store.leaves(other).nonzero()[0].tolist() == [9]
    assert np.array_equal(store.leaves(versions[-1]), newest)  # the glance did not cost it
    for _ in range(6):
        other = store.write(other, *more)
    with pytest.raises(RuntimeError, match=EXPIRED):  # now nobody has asked for it for longest
        store.leaves(versions[-1])


@pytest.mark.parametrize("broken", ["_sums", "_lows"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_write_that_is_cut_short_changes_nothing(monkeypatch: pytest.MonkeyPatch, broken: str, nth: int) -> None:
    rng, store = np.random.default_rng(0), Priorities(layout_of(5000), True)
    known = {store.first: np.zeros(5000, np.float32)}
    version = store.first
    for _ in range(4):
        version = store.write(version, rng.integers(0, 5000, 50).astype(np.int32), some_leaves(rng, 50))
        known[version] = store.leaves(version)
    real, calls = getattr(sumtree, broken), [0]

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth:
            raise MemoryError("no room")
        return real(*args)

    more = rng.integers(0, 5000, 50).astype(np.int32), some_leaves(rng, 50)
    for act in (lambda: store.write(version, *more), lambda: store.leaves(store.first)):  # a walk writes, too
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(sumtree, broken, fails)
            with pytest.raises(MemoryError):
                act()
        for v, expected in known.items():
            check(store, v, expected)
        check(store, version, known[version])  # and here again
    made = store.write(version, *more)
    check(store, made, store.leaves(made))


# ------------------------------------------------------------------------------------------------- buffers

CAPACITY, LANES, BATCH = 60, 3, 16
EXAMPLE = {"x": jax.ShapeDtypeStruct((), jnp.int32), "done": jax.ShapeDtypeStruct((), jnp.bool_)}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "buffer": dict(normalize="buffer", alpha=1.0, beta=1.0, eps=0.0),
    "independent": dict(normalize=None, stratified=False, alpha=0.5),
}
WINDOWS = fbuf.views.Sequence(2, stride=2, episode_end=("done",))


def make(on: str, options: str = "default", **parts: Any) -> fbuf.Buffer:
    return fbuf.Buffer(CAPACITY, sampler=Prioritized(on=on, **OPTIONS[options]), **{"lanes": LANES, **parts})


def verb(buffer: fbuf.Buffer, what: str, state: Any, seed: Any) -> Any:
    """One verb with made-up arguments; `(state, what it gave)`."""
    key = jax.random.key(seed)
    if what in ("extend", "more"):
        count = 4 if what == "extend" else 23  # more than a lane holds
        bits = jax.random.bits(key, (count, LANES), jnp.uint32)
        rows = {"x": bits.astype(jnp.int32), "done": bits % 5 == 0}
        priority = (bits % 1000).astype(jnp.float32) if what == "more" else None
        return buffer.extend(state, rows, mask=bits % 7 > 0, priority=priority), None
    if what == "set":
        return buffer.set(state, alpha=jnp.asarray(seed % 8, jnp.float32) / 4), None
    if what == "clear":
        return buffer.clear(state), None
    state, batch = buffer.sample(state, key, BATCH, beta=jnp.float32(0.7))
    errors = jnp.exp(jax.random.normal(key, (BATCH,), jnp.float32) * jnp.float32(6)).at[3].set(jnp.nan)
    return buffer.update_priority(state, batch.index, jnp.where(seed % 4 > 0, errors, jnp.float32(0))), batch


VERBS = ("extend", "more", "learn", "set", "clear")
FORMS: dict[str, Callable[..., Any]] = {
    "eager": lambda buffer: functools.partial(verb, buffer),
    "jit": lambda buffer: jax.jit(functools.partial(verb, buffer), static_argnums=0),
    "donated": lambda buffer: jax.jit(functools.partial(verb, buffer), static_argnums=0, donate_argnums=1),
}
run = functools.cache(lambda buffer, form: FORMS[form](buffer))
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(("extend",) * 3 + ("learn",) * 4 + VERBS), st.integers(0, 2**16)), min_size=2, max_size=14
)


def same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.array_equal(a, b, equal_nan=True), (a, b)


def leaves_of(state: Any) -> np.ndarray:
    """Of a buffer without lanes that are cut: float32[C]."""
    tree = state.sampler.tree
    return _hosttree.leaves(tree) if isinstance(tree, _hosttree.HostTree) else np.asarray(tree)[:CAPACITY]


def compare(device: Any, host: Any) -> None:
    """Everything of two states that can be seen of their priorities."""
    same(leaves_of(device), leaves_of(host))
    same(device.sampler.max_priority, host.sampler.max_priority)
    same(device.counters, host.counters)


@pytest.mark.parametrize(
    ("form", "options", "view"),
    [("jit", "default", fbuf.views.Row())]
    + [
        pytest.param(form, options, view, marks=pytest.mark.slow)
        for form, options, view in (
            ("donated", "buffer", WINDOWS),
            ("donated", "default", fbuf.views.Row()),
            ("eager", "default", WINDOWS),
            ("eager", "buffer", fbuf.views.Row()),
            ("jit", "independent", WINDOWS),
        )
    ],
)
@settings(max_examples=25)
@given(program=PROGRAMS)
def test_any_sequence_of_verbs_is_that_of_the_device(form, options, view, program):
    device, host = make("device", options, view=view), make("host", options, view=view)
    states = device.init(EXAMPLE), host.init(EXAMPLE)
    for what, seed in program:
        (first, one), (second, two) = (
            run(buffer, form)(what, state, jnp.int32(seed))
            for buffer, state in zip((device, host), states, strict=True)
        )
        states = first, second
        same(one, two)
        compare(*states)


@settings(max_examples=25)
@given(program=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(VERBS), st.integers(0, 2**16)), max_size=20))
def test_old_states_and_futures_stay_what_they_are(program):
    """Verbs on any of the last six states, both buffers alike: no state is changed by what another becomes."""
    device, host = make("device"), make("host")
    states = [(device.init(EXAMPLE), host.init(EXAMPLE))]
    for back, what, seed in program:
        one, two = states[-1 - back % len(states)]
        (one, first), (two, second) = run(device, "jit")(what, one, seed), run(host, "jit")(what, two, seed)
        same(first, second)
        states = [*states, (one, two)][-6:]
        for pair in states:
            compare(*pair)


@pytest.mark.slow
def test_a_scan_is_its_steps() -> None:
    host, seeds = make("host"), np.arange(12, dtype=np.int32)

    def steps(state: Any, seeds: jax.Array) -> Any:
        def step(state: Any, seed: jax.Array) -> Any:
            return verb(host, "learn", verb(host, "extend", state, seed)[0], seed)

        return lax.scan(step, state, seeds)

    last, batches = jax.jit(steps, donate_argnums=0)(host.init(EXAMPLE), seeds)
    state, single = host.init(EXAMPLE), []
    for seed in seeds:
        state, batch = run(host, "jit")("learn", run(host, "jit")("extend", state, seed)[0], seed)
        single.append(batch)
    same(batches, jax.tree.map(lambda *x: np.stack(x), *single))
    compare(last, state)


def test_order_within_a_jit_is_the_order_written() -> None:
    """Many writes and draws of one program, on several branches."""

    def tangle(verb: Any, state: Any) -> Any:
        out = []
        state, _ = verb("extend", state, 1)
        left = right = state
        for i in range(2):
            left, one = verb("learn", left, i)
            right, two = verb("learn", right, 10 + i)
            out += [one, two, verb("learn", state, 20 + i)[1]]
        return left, right, out

    host = make("host")
    one = jax.jit(lambda state: tangle(lambda what, s, n: verb(host, what, s, jnp.int32(n)), state))(host.init(EXAMPLE))
    two = tangle(lambda what, s, n: run(host, "jit")(what, s, np.int32(n)), host.init(EXAMPLE))
    same(one[2], two[2])
    compare(one[0], two[0])
    compare(one[1], two[1])


def test_peek_over_many_keys() -> None:
    keys, buffer = jax.random.split(jax.random.key(0), 5), make("host")
    state, _ = run(buffer, "jit")("extend", buffer.init(EXAMPLE), np.int32(0))
    single = [buffer.peek(state, key, BATCH) for key in keys]
    many = jax.jit(jax.vmap(lambda key: buffer.peek(state, key, BATCH)))(keys)
    same(jax.tree.map(lambda *x: np.stack(x), *single), many)


def test_a_state_that_is_too_old_says_so() -> None:
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
        with pytest.raises((RuntimeError, ValueError), match=EXPIRED):
            jax.block_until_ready(attempt())
    assert isinstance(fbuf.stores()[0]._store.last_error, RuntimeError)
    assert np.asarray(buffer.sample(new, jax.random.key(0), 4)[1].mask).all()  # who carries on does not notice


def test_threads_that_share_states() -> None:
    """Each goes its own way from the same states, all at once."""
    device, host = make("device"), make("host")
    start = [run(b, "jit")("extend", b.init(EXAMPLE), 0)[0] for b in (device, host)]
    for what in ("learn", "extend", "more"):  # compiled before
        run(device, "jit")(what, start[0], 0), run(host, "jit")(what, start[1], 0)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            one, two = start
            for i in range(12):
                what = ("learn", "extend", "learn", "more")[i % 4]
                one, first = run(device, "jit")(what, one, 100 * number + i)
                two, second = run(host, "jit")(what, two, 100 * number + i)
                same(first, second)
            compare(one, two)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(t.is_alive() for t in threads)


def test_replay_shared_by_threads() -> None:
    replay = fbuf.Replay(fbuf.Buffer(CAPACITY, sampler=Prioritized(on="host")), {"x": 0})
    replay.extend({"x": np.arange(CAPACITY)})
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(30):
                batch = replay.sample(8, to="numpy")
                assert batch.mask.all() and np.array_equal(batch.data["x"] % CAPACITY, batch.index.slot)
                replay.update_priority(batch.index, batch.data["x"] + 1.0)
                if number == 0:
                    replay.add({"x": CAPACITY + i})
        except ValueError as error:  # another thread wrote over a row in between: counted, and said
            if "stale" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(t.is_alive() for t in threads)


# ------------------------------------------------------------------------------------------ beside other parts


def prefetched(on: str, storage: Any) -> Any:
    buffer = make(on, storage=storage, prefetch=1, batch_size=BATCH)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, seed: jax.Array) -> Any:
        return verb(buffer, "learn", verb(buffer, "extend", state, seed)[0], seed)

    state, out = buffer.init(EXAMPLE), []
    for i in range(5):
        state, batch = step(state, jnp.int32(i))
        out.append(jax.device_get(batch))
    return out


@pytest.mark.slow
def test_batches_drawn_ahead() -> None:
    same(prefetched("device", fbuf.storages.Device()), prefetched("host", fbuf.storages.Host()))


@pytest.mark.slow
def test_convert_and_resume(tmp_path: Any) -> None:
    memmap = fbuf.storages.Memmap(str(tmp_path / "rows"))
    plain = fbuf.Buffer(20, storage=memmap)
    host = dataclasses.replace(plain, sampler=Prioritized(on="host"))
    state = plain.extend(plain.init({"x": 0}), {"x": jnp.arange(31)})
    made = plain.convert(host, state)
    assert len(fbuf.stores()) == 2
    device = dataclasses.replace(plain, sampler=Prioritized())
    batches = [b.peek(s, jax.random.key(0), 6) for b, s in ((host, made), (device, plain.convert(device, state)))]
    same(*batches)
    del state, made
    for buffer in (device, host):
        gc.collect()
        state = buffer.resume({"x": 0})
        batches.append(buffer.peek(state, jax.random.key(0), 6))
        if buffer is device:
            del state
    same(*batches[2:])
    with pytest.raises(TypeError, match=r"Buffer\.convert.*priorities on the host"):
        jax.jit(lambda s: host.convert(host, s))(state)


@pytest.mark.slow
def test_growing() -> None:
    grown = []
    for on in ("device", "host"):
        ragged = fbuf.Buffer(4, storage=fbuf.storages.Ragged(), sampler=Prioritized(on=on, normalize="buffer"))
        state = ragged.extend(ragged.init({"x": 0.0, "s": ""}), [{"x": float(i), "s": "a"} for i in range(4)])
        state, batch = ragged.sample(state, jax.random.key(0), 4)
        state = ragged.update_priority(state, batch.index, jnp.arange(4.0))
        larger, state = ragged.grow(state, capacity=9)
        state = larger.add(state, {"x": 9.0, "s": ""})
        batch = larger.sample(state, jax.random.key(1), 8)[1]
        grown.append((batch.index, batch.probability, batch.weight))
    same(*grown)


def test_bytes_are_counted() -> None:
    example, capacity = {"x": jnp.zeros(4)}, 50_000
    for storage in (fbuf.storages.Device(), fbuf.storages.Host()):
        device, host = (
            fbuf.Buffer(capacity, storage=storage, sampler=Prioritized(on=on, normalize="buffer"))
            for on in ("device", "host")
        )
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


def test_every_order_is_in_place() -> None:
    """Programs are compiled for shapes; nothing as large as a byte a row is copied."""
    buffer = fbuf.Buffer(400_000, sampler=Prioritized(on="host", normalize="buffer"))
    state = buffer.init({"x": jax.ShapeDtypeStruct((4,), jnp.uint8)})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    rows = {"x": jax.ShapeDtypeStruct((3, 4), jnp.uint8)}

    def steps(state: Any, rows: Any, keys: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            state, batch = buffer.sample(state, key, 8)
            state = buffer.extend(state, rows)
            return buffer.update_priority(state, batch.index, batch.weight), batch

        return lax.scan(step, state, keys)

    assert_inplace(steps, shapes, rows, jax.ShapeDtypeStruct((5, 2), jnp.uint32))


@pytest.mark.slow
def test_gradients_go_around_it() -> None:
    """Of a loss whose errors become priorities, also where what is drawn is drawn again for the backward pass."""
    results = []
    for on in ("device", "host"):
        buffer = make(on)
        state = run(buffer, "jit")("extend", buffer.init(EXAMPLE), np.int32(0))[0]

        def loss(weight: jax.Array, state: Any, buffer: fbuf.Buffer = buffer) -> Any:
            @jax.checkpoint
            def error(weight: jax.Array) -> Any:
                batch = buffer.peek(state, jax.random.key(1), BATCH)
                return weight * batch.data["x"].astype(jnp.float32) * batch.weight, batch.index

            errors, index = error(weight)
            return jnp.sum(errors**2), buffer.update_priority(state, index, errors)

        (value, state), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.float32(0.5), state)
        results.append((value, slope, leaves_of(state)))
    same(*results)
    assert float(results[0][1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("under", ["every flag", "transfer_guard"])
def test_every_verb_under_flags(under: str) -> None:
    names = ("x64", "strict dtype promotion", "rank promotion", "debug_nans", "tracer leaks")
    results = []
    for on in ("device", "host"):
        buffer = fbuf.Buffer(
            capacity=16,
            lanes=test_flags.LANES,
            sampler=Prioritized(on=on, normalize="buffer"),
            view=fbuf.views.Transition(n_step=3, stack=2),
        )
        state, x = buffer.init(test_flags.EXAMPLE), test_flags.given(buffer)
        verbs = functools.partial(test_flags.every_verb, buffer)
        if under == "transfer_guard":
            with test_flags.flags(under):
                results.append(verbs(state, x)[2])
        else:
            with test_flags.flags(*names):
                results.append(test_flags.plain(jax.jit(verbs)(state, x)[2]))
    same(*results)


# ------------------------------------------------------------------------------------------------- ownership


@pytest.fixture
def nothing_open() -> Iterator[None]:
    gc.collect()
    assert fbuf.stores() == []
    yield


@pytest.mark.parametrize(
    "storage", [fbuf.storages.Device(), pytest.param(fbuf.storages.Host(), marks=pytest.mark.slow)]
)
def test_a_store_goes_with_its_last_state(nothing_open: None, storage: Any) -> None:
    buffer = make("host", storage=storage)
    both = 1 if storage == fbuf.storages.Device() else 2
    state = run(buffer, "jit")("extend", buffer.init(EXAMPLE), 0)[0]
    after, batch = run(buffer, "jit")("learn", state, 1)
    assert len(fbuf.stores()) == both
    del state
    shared = copy.deepcopy(after)
    same(buffer.peek(shared, jax.random.key(0), 4), buffer.peek(after, jax.random.key(0), 4))
    del after
    run(buffer, "jit")("learn", shared, 2)
    leaf = shared.sampler.tree.version
    assert len(fbuf.stores()) == both
    del shared
    jax.block_until_ready((batch, leaf))
    gc.collect()
    assert fbuf.stores() == []


def test_closing_by_hand(nothing_open: None) -> None:
    buffer = make("host")
    state = buffer.init(EXAMPLE)
    (handle,) = fbuf.stores()
    assert "0 rows" in repr(handle) and handle.disk == 0 and handle.stats()["versions"] == 1
    store: Any = handle._store
    with handle:
        handle.repack()
        state = verb(buffer, "extend", state, jnp.int32(0))[0]
        assert handle.stats()["rows_live"] > 0
    with pytest.raises((RuntimeError, ValueError), match="is not open in this process"):
        jax.block_until_ready(buffer.sample(state, jax.random.key(0), 4))
    with pytest.raises(RuntimeError, match="closed"):
        store.leaves(2)
    assert store.nbytes < 1000


def test_a_pending_draw_keeps_its_store(nothing_open: None) -> None:
    """The state is dropped while what it draws by is still being computed."""

    @jax.jit
    def late(key: jax.Array) -> jax.Array:
        slow = lax.fori_loop(0, 300, lambda i, a: jnp.tanh(a @ a), jnp.full((200, 200), 0.01, jnp.float32))
        return key + jnp.isnan(slow[0, 0]).astype(key.dtype)

    buffer = make("host")
    draw = jax.jit(lambda state, key: buffer.peek(state, key, BATCH))
    state = run(buffer, "jit")("extend", buffer.init(EXAMPLE), 0)[0]
    expected = draw(state, jnp.array([0, 7], jnp.uint32))
    batch = draw(state, late(jnp.array([0, 7], jnp.uint32)))
    del state
    gc.collect()
    same(expected, batch)


def test_what_cannot_be_is_said(nothing_open: None) -> None:
    buffer = make("host")
    message = r"Buffer\.init: priorities on the host cannot be traced.*outside jit, vmap and scan"
    for attempt in (
        lambda: jax.jit(lambda: buffer.init(EXAMPLE))(),
        lambda: jax.vmap(lambda x: buffer.init(EXAMPLE))(jnp.zeros(3)),
        lambda: jax.eval_shape(buffer.init, EXAMPLE),
    ):
        with pytest.raises(TypeError, match=message):
            attempt()
    assert fbuf.stores() == []
    state = buffer.init(EXAMPLE)
    with pytest.raises(TypeError, match='priorities on the host cannot be pickled.*on="device"'):
        pickle.dumps(state)
    several = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for what in ("extend", "learn", "clear"):
        with pytest.raises(TypeError, match=r'priorities live on the host cannot be vmapped.*on="device"'):
            jax.vmap(lambda s, w=what: verb(buffer, w, s, jnp.int32(0)))(several)
    with pytest.raises(ValueError, match=r'on is "?\'?cuda.*expected "device" or "host".*jax\.device_put'):
        Prioritized(on="cuda")
    with pytest.raises(ValueError, match="made by another buffer"):
        make("device").sample(state, jax.random.key(0), 4)
    with pytest.raises(ValueError, match="made by another buffer"):
        buffer.sample(make("device").init(EXAMPLE), jax.random.key(0), 4)


def test_it_is_a_value() -> None:
    one = Prioritized(on="host", alpha=0.5)
    assert one == pickle.loads(pickle.dumps(one)) != Prioritized(alpha=0.5)
    assert repr(one) == "Prioritized(alpha=0.5, on='host')"
    assert fbuf.prioritized(10, on="host").sampler.on_host


def test_stores_of_equal_buffers_share_programs() -> None:
    buffer, traces = make("host"), []

    @jax.jit
    def step(state: Any) -> Any:
        traces.append(1)
        return verb(buffer, "extend", state, jnp.int32(0))[0]

    for _ in range(3):
        state = step(buffer.init(EXAMPLE))
        jax.block_until_ready(state)
        ids = owner.join_id(np.asarray(state.sampler.tree.id))
        del state
        gc.collect()
    assert ids and len(traces) == 1


# ----------------------------------------------------------------------------------------------- other backends


def test_the_callbacks_for_accelerators_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off CPU there is no buffer_callback; `io_callback` and `pure_callback` run here just as well."""
    used: list[str] = []
    for name in ("io_callback", "pure_callback"):
        module = jax.experimental if name == "io_callback" else jax
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, real=real, **k: (used.append(n), real(*a, **k))[1])

    plain = make("host")
    buffer = dataclasses.replace(plain, sampler=Prioritized(on="host", beta=0.5))  # `verb` gives beta; traced anew

    def step(state: Any, seed: jax.Array) -> Any:
        return verb(buffer, "learn", verb(buffer, "extend", state, seed)[0], seed)

    expected, single = plain.init(EXAMPLE), []
    for seed in np.arange(4, dtype=np.int32):
        expected, batch = run(plain, "jit")("learn", run(plain, "jit")("extend", expected, seed)[0], seed)
        single.append(batch)
    keys = jax.random.split(jax.random.key(0), 3)
    peeked = [plain.peek(expected, key, 4, beta=0.7) for key in keys]
    assert not used

    monkeypatch.setattr(jax, "default_backend", lambda: "elsewhere")
    state, batches = jax.jit(lambda state: lax.scan(step, state, jnp.arange(4)))(buffer.init(EXAMPLE))
    same(jax.tree.map(lambda *x: np.stack(x), *single), batches)
    compare(expected, state)
    many = jax.vmap(lambda key: buffer.peek(state, key, 4, beta=0.7))(keys)
    same(jax.tree.map(lambda *x: np.stack(x), *peeked), many)
    assert set(used) == {"io_callback", "pure_callback"}
    with pytest.raises(TypeError, match="priorities live on the host cannot be vmapped"):
        jax.vmap(lambda x: buffer.set(buffer.clear(verb(buffer, "extend", state, x)[0])))(jnp.arange(2))


@pytest.mark.slow
def test_several_devices_are_refused() -> None:
    """Any one device will do; inputs that span two are refused with words of our own."""
    script = """
import jax, jax.numpy as jnp, numpy as np, fbuf
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = jax.devices()
assert len(devices) == 2
everywhere = NamedSharding(Mesh(np.array(devices), ("d",)), P())
buffer = fbuf.prioritized(16, on="host")
rows = {"x": jnp.arange(16)}
state = jax.device_put(buffer.init({"x": 0}), devices[1])
state = jax.jit(buffer.extend)(state, jax.device_put(rows, devices[1]))
state, batch = buffer.sample(state, jax.device_put(jax.random.key(0), devices[1]), 4)
assert batch.mask.all() and batch.data["x"].devices() == {devices[1]} == state.sampler.tree.version.devices()
plain = buffer.init({"x": 0})
for call in (
    lambda: buffer.extend(jax.device_put(plain, everywhere), rows),
    lambda: jax.jit(buffer.sample, static_argnums=2)(jax.device_put(plain, everywhere), jax.random.key(0), 4),
):
    try:
        jax.block_until_ready(call())
    except ValueError as error:
        assert "serves one device, but this computation spans 2" in str(error), error
        assert 'samplers.Prioritized(on="device")' in str(error), error
    else:
        raise AssertionError("not refused")
print("done")
"""
    assert run_script(script, XLA_FLAGS="--xla_force_host_platform_device_count=2").strip() == "done"


def run_script(script: str, **environment: str) -> str:
    root = os.path.dirname(os.path.dirname(os.path.abspath(fbuf.__file__)))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root, **environment}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
