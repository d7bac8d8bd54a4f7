"""Frozen buffers: the batches of a `Device` buffer that holds the same rows, bit for bit."""

import copy
import dataclasses
import functools
import gc
import itertools
import pickle
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._buffer import convert
from fbuf._formats import dataset
from fbuf._indexing import anchors
from fbuf.samplers import Epoch, Prioritized, Staleness, Uniform
from fbuf.storages import DataSet, Device
from fbuf.testing import assert_inplace
from fbuf.views import Row, Transition
from fbuf.writers import Frozen
from tests.support import segments
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS
from tests.support.refusals import raises
from tests.support.trees import same, x64

BATCH = 6
STACKS = Transition(stack=3, n_step=2, autoreset="same_step")


def device(rows, **settings):
    buffer = fbuf.Buffer(len(rows["action"]), **settings)
    return buffer, buffer.extend(buffer.init({name: array[0] for name, array in rows.items()}), rows)


@functools.cache
def stepping(buffer):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, key):
        state, batch = buffer.sample(state, key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        return state, batch

    return step


def check_batches(path, rows, sampler, view):
    """Draw and update as a buffer on the device does, bit for bit."""
    settings = {"view": VIEWS[view], "sampler": SAMPLERS[sampler], "episode_end": ("terminated", "truncated")}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    if one[1].anchors is not None:
        same((one[1].anchors.flags, one[1].anchors.count), (two[1].anchors.flags, two[1].anchors.count))
    drawn = 0
    for i in range(6):
        state, batch = stepping(one[0])(one[1], jax.random.key(i))
        other, wanted = stepping(two[0])(two[1], jax.random.key(i))
        same(batch, wanted)
        drawn += int(batch.mask.sum())
        one, two = (one[0], state), (two[0], other)
    same(one[0].stats(one[1]), two[0].stats(two[1]))
    assert drawn > BATCH


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(convert, "BLOCK", 8)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("frozen")
    return path, segments.make(path)


@pytest.fixture
def opened(made):
    yield fbuf.datasets.open(made[0], view=STACKS, sampler=Prioritized())
    gc.collect()


def test_the_batches_of_device(made):
    check_batches(*made, "Uniform", "Transition")


def test_what_is_read(made):
    path, rows = made
    buffer, state = fbuf.datasets.open(path)
    for got, want in (
        (buffer.rows(state), np.arange(34)),
        (buffer.rows(state, last=5), np.arange(29, 34)),
        (buffer.get(state, jnp.array([[0, 33], [34, -1]], jnp.int32)), np.array([[0, 33], [34, -1]])),
    ):
        there = (want >= 0) & (want < 34)
        np.testing.assert_array_equal(got.mask, there)
        np.testing.assert_array_equal(got.index.generation, there)  # one generation, for good
        for name, array in rows.items():
            np.testing.assert_array_equal(got.data[name][there], array[want[there]])
            assert not np.asarray(got.data[name])[~there].any()
    assert bool(buffer.can_sample(state)) and int(buffer.size(state)) == 34
    assert set(buffer.nbytes(state)) == {"device", "host", "disk"}
    plan = buffer.plan(fbuf.datasets._open.example(segments.SCHEMA))
    assert plan.device == sum(x.nbytes for x in jax.tree.leaves(state)) and plan.peak_extend == 0


def test_writes_are_refused_when_they_are_traced(made, opened):
    (_, rows), (buffer, state) = made, opened
    row = {name: array[0] for name, array in rows.items()}
    index = buffer.peek(state, jax.random.key(0), BATCH).index
    for verb in (
        lambda state: buffer.add(state, row),
        lambda state: buffer.extend(state, rows),
        lambda state: buffer.clear(state),
        lambda state: buffer.update_rows(state, index, {"reward": jnp.zeros(BATCH)}),
        lambda state: buffer.grow(state),
        lambda state: buffer.resume(row),
    ):
        for call in (verb, lambda state, verb=verb: jax.eval_shape(verb, state)):
            raises(TypeError, r"expected a writer that accepts rows.*preprocess", call, state)


def test_memory_of_a_row():
    def leaves(capacity, sampler, view):
        buffer = fbuf.Buffer(capacity, storage=DataSet("x"), writer=Frozen(), sampler=sampler, view=view)
        spec = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in segments.SCHEMA.leaves}
        rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(spec))
        state = jax.eval_shape(functools.partial(fbuf._buffer.buffer.prefetch.empty_state, buffer), rows)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    small, large = 1 << 12, 1 << 22
    for sampler in (Uniform(), Epoch(), Staleness(4, unit=3)):
        for view, each in ((Row(), 0), (STACKS, 1 + 4 / anchors.BLOCK)):
            assert leaves(large, sampler, view) - leaves(small, sampler, view) == (large - small) * each
    spare = leaves(large, Prioritized(uniform=0.1), Transition(autoreset="same_step")) / large
    assert spare < 1 + 4 / anchors.BLOCK + 4.6  # no log for the share that is drawn whatever its priority


@pytest.mark.more
@given(st.lists(st.booleans(), min_size=1, max_size=700), st.integers(0, 2**31 - 1))
def test_the_nth_anchor(is_open, seed):
    rng = np.random.default_rng(seed)
    capacity = 700  # of one shape, so that it compiles once
    flags = rng.integers(0, 256, capacity).astype(np.uint8) & 0xF7
    flags[: len(is_open)] |= np.where(is_open, np.uint8(8), np.uint8(0))
    want = np.flatnonzero(flags & 8)
    before = _counted(flags)
    counts = [np.count_nonzero(flags[:start] & 8) for start in range(0, capacity, anchors.BLOCK)]
    np.testing.assert_array_equal(before, np.array(counts, np.int32))
    nth = rng.integers(0, len(want) + 2, 16).astype(np.int32)
    got, some = np.asarray(_nth(flags, before, nth)), nth < len(want)
    assert ((got >= 0) & (got < capacity)).all()
    np.testing.assert_array_equal(got[some], want[nth[some]])
    expected = np.append(want, [capacity] * 2)[nth]
    np.testing.assert_array_equal(_scanned(flags, nth, np.ones(16, bool)), expected)
    wanted = rng.integers(0, 2, 16).astype(bool)
    for sizes in ((8, 4096), (4, 2)):  # three blocks of 256 rows, and two of 512 in parts of 128 and 32
        found = _summed(flags, nth, wanted, sizes)
        np.testing.assert_array_equal(found, np.where(wanted, expected, capacity))


@functools.partial(jax.jit, static_argnums=3)
def _summed(flags, nth, wanted, sizes):
    with mock.patch.multiple(anchors, _PARTS=sizes[0], _MOST_BLOCKS=sizes[1]):
        return anchors._nth_by_sums(flags, nth, wanted)


_counted, _nth = jax.jit(anchors.count_before), jax.jit(anchors.nth_by_count)
_scanned = jax.jit(functools.partial(anchors.nth_by_scan, block=4))


def test_a_state_keeps_its_data_set_open(made):
    path = str(made[0])
    gc.collect()
    before = len(fbuf.stores())
    buffer, state = fbuf.datasets.open(path)
    twin = copy.deepcopy(state)
    assert len(fbuf.stores()) == before + 1 and dataset.is_open(path)
    del state
    gc.collect()
    assert int(buffer.size(twin)) == 34
    buffer.peek(twin, jax.random.key(0), 3)
    raises(TypeError, "cannot be pickled", pickle.dumps, twin)
    several = jax.tree.map(lambda x: jnp.stack([x, x]), twin)
    raises(TypeError, "cannot be vmapped", jax.vmap(lambda s: buffer.sample(s, jax.random.key(0), 2)), several)
    raises(TypeError, "cannot be traced", jax.jit(buffer.init), fbuf.datasets._open.example(segments.SCHEMA))
    del several
    jax.block_until_ready(twin)
    del twin
    gc.collect()
    assert len(fbuf.stores()) == before and not dataset.is_open(path)


def test_parts_that_do_not_go_together(made):
    path = str(made[0])
    example = fbuf.datasets._open.example(segments.SCHEMA)
    for parts in ({"storage": DataSet(path)}, {"storage": Device(), "writer": Frozen()}):
        raises(ValueError, "expected both for a data set, or neither", fbuf.Buffer, 34, **parts)
    for capacity, lanes, reward, message in (
        (33, None, 0.0, "capacity 33 in 1 lanes; expected 34 in one"),
        (34, 2, 0.0, "in 2 lanes"),
        (34, None, jnp.zeros(2), "rows of .* are"),
    ):
        buffer = fbuf.Buffer(capacity, DataSet(path), writer=Frozen(), lanes=lanes)
        raises(ValueError, message, buffer.init, {**example, "reward": reward})
    for settings in ({"path": ""}, {"path": path, "memory": -1}, {"path": path, "cache": 1.5}):
        raises((TypeError, ValueError), "DataSet: ", DataSet, **settings)
    buffer = fbuf.Buffer(34, storage=DataSet(path), writer=Frozen())
    assert pickle.loads(pickle.dumps(buffer)) == buffer and "Frozen()" in repr(buffer)
    state = fbuf.Buffer(34).init(example)
    raises(TypeError, "another storage made this state", buffer.sample, state, jax.random.key(0), 2)


def test_any_structure(tmp_path):
    numbers = np.arange(6, dtype=np.int32)
    cases = [
        ({"a/b": ((), "int32"), "a/c": ((2,), "float32")}, None, {"a": {"b": 0, "c": 0}}),
        ({"": ((), "int32")}, None, 0),
        ({"0": ((), "int32"), "1/x": ((), "bool")}, {"tuple": [0, {"dict": [["x", 1]]}]}, (0, {"x": 0})),
    ]
    for i, (leaves, structure, want) in enumerate(cases):
        schema = dataset.Schema(leaves, structure)
        rows = {leaf.name: np.zeros((6, *leaf.shape), leaf.dtype) for leaf in schema.leaves}
        rows[schema.names[0]] = numbers
        segments.write(tmp_path / str(i), 0, schema, rows)
        dataset.finish(tmp_path / str(i), [dataset.SegmentRows(0)])
        buffer, state = fbuf.datasets.open(tmp_path / str(i))
        data = buffer.rows(state).data
        assert jax.tree.structure(data) == jax.tree.structure(want)
        np.testing.assert_array_equal(jax.tree.leaves(data)[0], numbers)


def test_64_bits_need_x64(tmp_path):
    segments.write(tmp_path, 0, dataset.Schema({"t": ((), "float64")}), {"t": np.arange(3.0)})
    dataset.finish(tmp_path, [dataset.SegmentRows(0)])
    raises(ValueError, "leaf 't' is float64, but x64 is off.*float32", fbuf.datasets.open, tmp_path)
    with x64():
        buffer, state = fbuf.datasets.open(tmp_path)
        assert buffer.rows(state, last=1).data["t"].dtype == np.float64


@pytest.mark.more
@pytest.mark.optimized
def test_the_batches_of_device_bit_for_bit(made):
    check_batches(*made, "Epoch", "Sequence('mask')")


@pytest.mark.more
@pytest.mark.in_place
def test_a_step_copies_nothing(made):
    buffer, state = fbuf.datasets.open(made[0], view=Transition(stack=3, autoreset="same_step"), sampler=Prioritized())
    large = dataclasses.replace(buffer, capacity=4_000_000)
    spec, structure = buffer.storage.spec(state.rows)
    rows = large.storage.abstract(large.geometry, spec, structure)
    abstract = jax.eval_shape(functools.partial(fbuf._buffer.buffer.prefetch.empty_state, large), rows)

    def step(state, key):
        state, batch = large.sample(state, key, 8)
        state = large.update_priority(state, batch.index, jnp.ones(8))
        return large.sample(state, key, 8)

    assert_inplace(step, abstract, jax.ShapeDtypeStruct((2,), jnp.uint32))
    # and anchors of four million rows are made with the memory of a block
    other = dataclasses.replace(large, sampler=Uniform())
    made_of = jax.jit(lambda state: large.convert(other, state)).lower(abstract).compile().memory_analysis()
    assert made_of.temp_size_in_bytes < 500_000


@pytest.mark.more
def test_prefetch(made):
    buffer, state = fbuf.datasets.open(made[0], prefetch=1, batch_size=BATCH)
    state, batch = buffer.sample(state, jax.random.key(0))
    same(batch, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)))
    for i in range(1, 4):
        state, batch = buffer.sample(state, jax.random.key(i))
        same(batch, buffer.peek(state, jax.random.key(i - 1)))
    assert fbuf.stores()[-1].nbytes > 2 * BATCH * 36  # rows that were read ahead


@pytest.mark.more
def test_save_and_load(made, opened, tmp_path):
    buffer, state = opened
    step = stepping(buffer)
    state, _ = step(state, jax.random.key(0))
    written = fbuf.save(tmp_path / "saved", buffer, state, extra={"n": 1}).result()
    assert written.bytes_total < 34 * 36  # no frames
    again, other, extra = fbuf.load(tmp_path / "saved", extra=True)
    assert again == buffer and extra == {"n": 1}
    for i in range(1, 3):
        (state, batch), (other, wanted) = step(state, jax.random.key(i)), step(other, jax.random.key(i))
        same(batch, wanted)


@pytest.mark.more
def test_load_where_it_moved(tmp_path):
    was, now = tmp_path / "was", tmp_path / "now"
    segments.make(was)
    buffer, state = fbuf.datasets.open(was, sampler=Epoch())
    state, _ = buffer.sample(state, jax.random.key(0), 3)
    fbuf.save(tmp_path / "saved", buffer, state)
    want = buffer.peek(state, jax.random.key(1), 5)
    was.rename(now)
    raises(FileNotFoundError, r"no data set at .*storages.DataSet\('/its/path'\)", fbuf.load, tmp_path / "saved")
    there = dataclasses.replace(buffer, storage=DataSet(str(now), memory=5))
    other, state = fbuf.load(tmp_path / "saved", there)
    assert other == there
    same(other.peek(state, jax.random.key(1), 5), want)
    segments.make(was, seed=1)  # the same shapes, other rows
    raises(fbuf.SchemaError, "has identity .* were rewritten", lambda: fbuf.load(tmp_path / "saved"))
    raises(ValueError, "resize is 50, but rows are of DataSet", fbuf.load, tmp_path / "saved", resize=50)


# Each sampler and each view, and not every pair of them, which storages on the device and the host have.
CASES = [case for case in zip(SAMPLERS, itertools.cycle(VIEWS)) if case not in REFUSED]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sampler", "view"), CASES)
def test_the_batches_of_device_with_every_sampler_and_view(made, sampler, view):
    check_batches(*made, sampler, view)


@pytest.mark.exhaustive
def test_a_replay_of_what_was_opened_leaves_its_state_usable(opened):
    buffer, state = opened
    index = buffer.peek(state, jax.random.key(0), 2).index
    state = buffer.update_priority(state, index, jnp.full(2, jnp.nan))  # counted, and no business of the replay
    replay = fbuf.Replay(buffer, state)
    replay.update_priority(replay.sample(2).index, np.full(2, 9.0))
    assert int(buffer.stats(state)["refused_nonfinite"]) == 2
    same(buffer.peek(state, jax.random.key(0), 2).index, index)
    with pytest.raises(ValueError, match="made by another buffer"):
        fbuf.Replay(dataclasses.replace(buffer, sampler=Uniform()), state)
    live = fbuf.Buffer(4)
    raises(TypeError, "example is a BufferState; expected one row", lambda: fbuf.Replay(live, live.init({"t": 0})))
    with pytest.raises(ValueError, match=r"other.storage is DataSet.*datasets.open\('/elsewhere'\)"):
        buffer.convert(dataclasses.replace(buffer, storage=DataSet("/elsewhere")), state)


@pytest.mark.exhaustive
@pytest.mark.parametrize("traced", [False, True])
def test_another_view_of_the_same_rows(made, traced):
    buffer, state = fbuf.datasets.open(made[0])
    other = dataclasses.replace(buffer, view=fbuf.views.Sequence(3, autoreset="same_step"), sampler=Epoch())
    want = fbuf.datasets.open(made[0], view=other.view, sampler=other.sampler)[1]
    got = (jax.jit(buffer.convert, static_argnums=0) if traced else buffer.convert)(other, state)
    same(dataclasses.replace(got, rows=None), dataclasses.replace(want, rows=None))
    back = other.convert(buffer, got)
    same(dataclasses.replace(back, rows=None), dataclasses.replace(state, rows=None))


@pytest.mark.exhaustive
def test_numbers_and_priorities(made):
    path, rows = made
    settings = {"view": Transition(stack=2, autoreset="same_step"), "sampler": Prioritized(largest="held", uniform=0.2)}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    for i in range(3):
        drawn = []
        for buffer, state in (one, two):
            state = buffer.set(state, alpha=0.3 + i, rebuild=True)
            state, batch = buffer.sample(state, jax.random.key(i), BATCH, beta=0.5)
            state = buffer.update_priority(state, batch.index, jnp.arange(BATCH) - 3.0)
            drawn.append((buffer, state, batch))
        same(drawn[0][2], drawn[1][2])
        one, two = drawn[0][:2], drawn[1][:2]
    same(one[0].stats(one[1]), two[0].stats(two[1]))
