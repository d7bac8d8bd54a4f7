"""Priorities on the host: the numpy tree, its versions, and buffers that have them against those on the device, bit for bit."""

import copy
import dataclasses
import functools
import gc
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf._algorithms import sum_tree
from fbuf._host import priorities
from fbuf._host.priorities import Layout, Priorities, Tree
from fbuf.samplers import Prioritized
from tests.support.host import use_other_callbacks
from tests.support.host_priorities import BATCH, CAPACITY, EXAMPLE, EXPIRED, KEY, VERBS, compare, make, run, verb
from tests.support.refusals import raises, raises_late
from tests.support.sum_tree import expected_tree
from tests.support.tables import one_of
from tests.support.threads import Thread
from tests.support.trees import same


@pytest.mark.parametrize("on", ["device", "host"])
def test_priorities_and_their_least_are_saved(on, tmp_path):
    buffer = fbuf.Buffer(8, sampler=Prioritized(on=on, normalize="buffer"))
    given = np.arange(1, 7, dtype=np.float32)
    state = buffer.extend(buffer.init(np.int32(0)), np.arange(6, dtype=np.int32), priority=given)
    fbuf.save(tmp_path, buffer, state)
    loaded, again = fbuf.load(tmp_path)
    same(loaded.priorities(again), buffer.priorities(state))
    same(loaded.peek(again, KEY, 16), buffer.peek(state, KEY, 16))


capacity = one_of(600, exhaustive=[1, 9, 70_000])


def layout_of(capacity):
    return Layout(*sum_tree.layout(capacity), sum_tree.middle(capacity))


def some_leaves(rng, number):
    """Of many sizes, some of them 0."""
    leaf = rng.random(number) * 10.0 ** rng.integers(-12, 12, number)
    return np.where(rng.random(number) < 0.2, 0, leaf).astype(np.float32)


@given(
    capacity=st.sampled_from([1, 2, 7, 8, 9, 64, 65, 513, 5000]),
    batches=st.lists(st.integers(1, 700), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_a_tree_is_the_sum_of_its_leaves(capacity, batches, seed):
    rng, tree, oracle = np.random.default_rng(seed), Tree(layout_of(capacity), True), np.zeros(capacity, np.float32)
    for batch in batches:
        index, leaf, before = rng.integers(0, capacity, batch), some_leaves(rng, batch), oracle.copy()
        old = tree.exchange(index, leaf)
        for i, value in zip(index, leaf, strict=True):  # the last wins
            oracle[i] = value
        assert np.array_equal(old, before[index])
        assert np.array_equal(tree.leaves, oracle) and np.array_equal(tree._nodes, expected_tree(oracle))
        assert tree.roots() == (expected_tree(oracle)[-8], np.min(oracle[oracle > 0], initial=np.inf))


def test_draws_are_those_of_the_device(capacity):
    """Bit for bit, and in lots."""
    rng, tree = np.random.default_rng(capacity), Tree(layout_of(capacity), False)

    @functools.partial(jax.jit, static_argnums=2)
    def draw(tree, key, stratified):
        top, bottom = sum_tree.uniforms(key, 300, stratified=stratified)
        return top, bottom, sum_tree.draw(tree, key, 300, capacity, stratified=stratified)

    for stratified in (False, True) if capacity > 9 else (False,):
        for seed in range(6):
            tree.fill(some_leaves(rng, capacity) if seed else np.zeros(capacity, np.float32))
            drawn = draw(tree._nodes, np.array([0, seed], np.uint32), stratified)
            top, bottom, (index, leaf) = jax.tree.map(np.asarray, drawn)
            got = tree.draw(top, bottom)
            assert np.array_equal(got, index) and np.array_equal(tree.leaves[got], leaf)
            assert (leaf > 0).all() or not tree.leaves.any()
    top, bottom = rng.random((2, 3 * priorities._PART + 5), np.float32)
    parts = [tree.draw(top[i : i + 1000], bottom[i : i + 1000]) for i in range(0, len(top), 1000)]
    assert np.array_equal(tree.draw(top, bottom), np.concatenate(parts))


def test_what_processors_take_for_zero_is_zero():
    leaf = np.array([np.nan, 1e-45, 2.0**-126, -1.0, -0.0, 1.0], np.float32)
    assert priorities.normal(leaf).tolist() == [0, 0, 2.0**-126, 0, 0, 1]


STEPS = st.lists(st.tuples(st.sampled_from("wwwwrc"), st.integers(0, 11), st.integers(0, 2**16)), max_size=40)


def check(store, version, expected):
    assert np.array_equal(store.leaves(version), expected)
    top = np.random.default_rng(version).random(16, np.float32)
    index, leaf, mass, least = store.draw(version, top, top)
    fresh = Tree(store.layout, store.least)
    fresh.fill(expected)
    assert np.array_equal(index, fresh.draw(top, top)) and np.array_equal(leaf, expected[index])
    assert (mass, least) == fresh.roots()


@given(steps=STEPS, slack=st.sampled_from([0, 30, 10_000]))
def test_every_version_is_itself_or_has_expired(steps, slack):
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


def test_who_carries_on_never_expires_and_memory_is_flat():
    layout = layout_of(40_000)
    store, version, rng = Priorities(layout, True), 1, np.random.default_rng(0)
    for _ in range(600):
        version = store.write(version, rng.integers(0, 40_000, 64).astype(np.int32), some_leaves(rng, 64))
    assert store.nbytes <= priorities.most_bytes(layout, True)
    assert len(store._steps) < 90 and store._kept <= 5000
    check(store, version, store.leaves(version))
    raises(RuntimeError, EXPIRED, store.leaves, store.first)
    assert isinstance(store.last_error, RuntimeError)
    for _ in range(600):
        version = store.write(version, np.zeros(1, np.int32), np.ones(1, np.float32))
    assert len(store._steps) == 256
    for _ in range(20):
        version = store.clear(version)
    assert store.nbytes <= 5 * store._tree.nbytes


@pytest.mark.parametrize(("broken", "nth"), [("_sums", 1), ("_sums", 5), ("_lows", 1), ("_lows", 2)])
def test_a_write_that_is_cut_short_changes_nothing(monkeypatch, broken, nth):
    rng, store = np.random.default_rng(0), Priorities(layout_of(5000), True)
    known = {store.first: np.zeros(5000, np.float32)}
    version = store.first
    for _ in range(4):
        version = store.write(version, rng.integers(0, 5000, 50).astype(np.int32), some_leaves(rng, 50))
        known[version] = store.leaves(version)
    real, calls = getattr(priorities, broken), [0]

    def fails(*args):
        calls[0] += 1
        if calls[0] == nth:
            raise RuntimeError("cut short")
        return real(*args)

    more = rng.integers(0, 5000, 50).astype(np.int32), some_leaves(rng, 50)
    for act in (lambda: store.write(version, *more), lambda: store.leaves(store.first)):  # a walk writes, too
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(priorities, broken, fails)
            raises(RuntimeError, "cut short", act)
        for v, expected in known.items():
            check(store, v, expected)
        check(store, version, known[version])  # and here again
    made = store.write(version, *more)
    check(store, made, store.leaves(made))


@pytest.mark.parametrize("what", ["write", "clear"])
def test_without_memory_other_versions_are_dropped(monkeypatch, what):
    rng, store = np.random.default_rng(0), Priorities(layout_of(5000), True)
    first = store.write(store.first, rng.integers(0, 5000, 50).astype(np.int32), some_leaves(rng, 50))
    index, leaf = rng.integers(-3, 5003, 900).astype(np.int32), some_leaves(rng, 900)
    index[:450] = 5000  # masked rows: a part without any
    expected = store.leaves(first)
    for i, value in zip(index.tolist(), leaf, strict=True):
        if 0 <= i < 5000:
            expected[i] = value
    sums = priorities._sums

    def small(children):
        if len(children) > 400:
            raise MemoryError("no room")
        return sums(children)

    def no_tree(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        if what == "write":
            patch.setattr(priorities, "_sums", small)
            patch.setattr(priorities, "_PART", 300)
            made = store.write(first, index, leaf)
        else:
            expected = np.zeros(5000, np.float32)
            patch.setattr(priorities, "Tree", no_tree)
            made = store.clear(first)
    assert np.array_equal(store.leaves(made), expected) and made > first
    check(store, made, expected)
    for version in (store.first, first):
        raises(RuntimeError, EXPIRED, store.leaves, version)
    check(store, store.write(made, index, leaf), store.leaves(store._newest))


WINDOWS = fbuf.views.Sequence(2, stride=2, episode_end=("done",), autoreset="same_step")
AHEAD = {"prefetch": 1, "batch_size": BATCH}
parts = one_of(
    {},
    exhaustive=[
        {"options": {"normalize": "buffer", "alpha": 1.0, "beta": 1.0, "eps": 0.0}, "view": WINDOWS},
        {"options": {"normalize": None, "stratified": False, "alpha": 0.5}},
        AHEAD,
        AHEAD | {"storage": fbuf.storages.Host(slack=2000)},
    ],
)


@settings(max_examples=5)
@example(program=[(0, "extend", 0), (0, "learn", 1), (0, "learn", 2)])
@given(program=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(VERBS), st.integers(0, 2**16)), max_size=20))
def test_old_states_and_futures_stay_what_they_are(parts, program):
    """Verbs on any of the last six states, both buffers alike: no state is changed by what another becomes."""
    device, host = make("device", **parts), make("host", **parts)
    states = [(device.init(EXAMPLE), host.init(EXAMPLE))]
    for back, what, seed in program:
        one, two = states[-1 - back % len(states)]
        (one, first), (two, second) = run(device)(what, one, seed), run(host)(what, two, seed)
        same(first, second)
        states = [*states, (one, two)][-6:]
        for pair in states:
            compare(*pair)


@pytest.fixture
def nothing_open():
    gc.collect()
    assert fbuf.stores() == []
    yield


storage = one_of(fbuf.storages.Device(), exhaustive=[fbuf.storages.Host()])


def test_a_store_goes_with_its_last_state(nothing_open, storage):
    buffer = make("host", storage=storage)
    both = 1 if storage == fbuf.storages.Device() else 2
    state = run(buffer)("extend", buffer.init(EXAMPLE), 0)[0]
    after, batch = run(buffer)("learn", state, 1)
    assert len(fbuf.stores()) == both
    del state
    shared = copy.deepcopy(after)
    same(buffer.peek(shared, KEY, 4), buffer.peek(after, KEY, 4))
    del after
    run(buffer)("learn", shared, 2)
    leaf = shared.sampler.tree.version
    assert len(fbuf.stores()) == both
    del shared
    jax.block_until_ready((batch, leaf))
    gc.collect()
    assert fbuf.stores() == []


def test_closing_by_hand(nothing_open):
    buffer = make("host")
    state = buffer.init(EXAMPLE)
    (handle,) = fbuf.stores()
    assert "0 rows" in repr(handle) and handle.disk == 0 and handle.stats()["versions"] == 1
    store = handle._store
    with handle:
        handle.repack()
        state = verb(buffer, "extend", state, jnp.int32(0))[0]
        assert handle.stats()["rows_live"] > 0
    raises_late("is not open in this process", buffer.sample, state, KEY, 4)
    raises(RuntimeError, "closed", store.leaves, 2)
    assert store.nbytes < 1000


def test_what_cannot_be_is_said(nothing_open):
    buffer = make("host")
    message = r'priorities on the host cannot be traced\. Call it outside jit, or use on="device"\.'
    for attempt in (
        lambda: jax.jit(lambda: buffer.init(EXAMPLE))(),
        lambda: jax.vmap(lambda x: buffer.init(EXAMPLE))(jnp.zeros(3)),
        lambda: jax.eval_shape(buffer.init, EXAMPLE),
    ):
        raises(TypeError, message, attempt)
    assert fbuf.stores() == []
    state = buffer.init(EXAMPLE)
    raises(TypeError, 'priorities on the host cannot be pickled.*on="device"', pickle.dumps, state)
    several = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for what in ("extend", "learn", "clear"):
        with pytest.raises(TypeError, match=r'priorities live on the host cannot be vmapped.*on="device"'):
            jax.vmap(lambda s, w=what: verb(buffer, w, s, jnp.int32(0)))(several)
    raises(ValueError, r'on is "?\'?cuda.*expected "device" or "host"', Prioritized, on="cuda")
    raises(ValueError, "made by another buffer", lambda: make("device").sample(state, KEY, 4))
    raises(ValueError, "made by another buffer", lambda: buffer.sample(make("device").init(EXAMPLE), KEY, 4))


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
def test_the_callbacks_for_accelerators_agree(monkeypatch):
    plain = make("host")
    buffer = dataclasses.replace(plain, sampler=Prioritized(on="host", beta=0.5))  # as in `verb`; traced again

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


@pytest.mark.exhaustive
def test_convert_and_resume(tmp_path):
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


@pytest.mark.exhaustive
def test_growing():
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


@pytest.mark.exhaustive
def test_threads_that_share_states():
    device, host = make("device"), make("host")
    start = [run(b)("extend", b.init(EXAMPLE), np.int32(0))[0] for b in (device, host)]

    def work(number):
        one, two = start
        for i in range(12):
            what, seed = ("learn", "extend", "learn", "more")[i % 4], np.int32(100 * number + i)
            one, first = run(device)(what, one, seed)
            two, second = run(host)(what, two, seed)
            same(first, second)
        compare(one, two)

    for thread in [Thread(work, n) for n in range(4)]:
        thread.ends()


@pytest.mark.exhaustive
def test_order_within_a_jit_is_the_order_written():
    def tangle(verb, state):
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
    two = tangle(lambda what, s, n: run(host)(what, s, np.int32(n)), host.init(EXAMPLE))
    same(one[2], two[2])
    compare(one[0], two[0])
    compare(one[1], two[1])
