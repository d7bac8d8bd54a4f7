"""Frozen buffers: for every view and sampler the batches of a `Device` buffer that holds the same rows, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import fbuf
from fbuf import _filled, _openrows, _pieces
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import DataSet, Device
from fbuf.views import Row, Transition
from fbuf.writers import Frozen
from tests.support import pieces
from tests.test_combinations import REFUSED, SAMPLERS, VIEWS

BATCH = 6
DEFAULT = {("Uniform", "Transition")}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors are made in several blocks, the last of them not full."""
    monkeypatch.setattr(_filled, "BLOCK", 8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pieces.Rows]:
    path = tmp_path_factory.mktemp("frozen")
    return path, pieces.make(path)


@pytest.fixture
def opened(made: tuple[Path, pieces.Rows]) -> Iterator[tuple[fbuf.Buffer, Any]]:
    yield fbuf.datasets.open(made[0], view=Transition(stack=3, n_step=2), sampler=Prioritized())
    gc.collect()


def device(rows: pieces.Rows, **settings: Any) -> tuple[fbuf.Buffer, Any]:
    """The oracle."""
    buffer = fbuf.Buffer(len(rows["action"]), **settings)
    return buffer, buffer.extend(buffer.init({name: array[0] for name, array in rows.items()}), rows)


def same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@functools.cache
def stepping(buffer: fbuf.Buffer) -> Any:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        return state, batch

    return step


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        pytest.param(s, v, marks=() if (s, v) in DEFAULT else pytest.mark.slow)
        for s in SAMPLERS
        for v in VIEWS
        if (s, v) not in REFUSED
    ],
)
def test_the_batches_of_device(made: tuple[Path, pieces.Rows], sampler: str, view: str) -> None:
    path, rows = made
    settings: Any = {"view": VIEWS[view], "sampler": SAMPLERS[sampler], "episode_end": ("terminated", "truncated")}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    if one[1].anchors is not None:
        same((one[1].anchors.flags, one[1].anchors.count), (two[1].anchors.flags, two[1].anchors.count))
    drawn = 0
    for i in range(6):
        (one_state, batch), (two_state, wanted) = (
            stepping(buffer)(state, jax.random.key(i)) for buffer, state in (one, two)
        )
        same(batch, wanted)
        drawn += int(batch.mask.sum())
        one, two = (one[0], one_state), (two[0], two_state)
    same(one[0].stats(one[1]), two[0].stats(two[1]))
    assert drawn > BATCH


# ------------------------------------------------------------------------------------------------------- all verbs


@pytest.mark.parametrize("sampler", [Uniform(), pytest.param(Prioritized(), marks=pytest.mark.slow)])
def test_eager_jitted_scanned_and_donated(made: tuple[Path, pieces.Rows], sampler: Any) -> None:
    buffer, state = fbuf.datasets.open(made[0], view=Transition(stack=3, n_step=2), sampler=sampler)
    keys = jax.random.split(jax.random.key(0), 3)

    def step(state: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        if sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        return state, batch

    eager, one = [], state
    for key in keys:
        one, batch = step(one, key)
        eager.append(batch)
    scanned = jax.jit(lambda state: lax.scan(step, state, keys))(state)[1]
    donating, two = jax.jit(step, donate_argnums=0), copy.deepcopy(state)
    for i, (key, batch) in enumerate(zip(keys, eager, strict=True)):
        same(jax.tree.map(lambda x, i=i: x[i], scanned), batch)
        two, again = donating(two, key)
        same(again, batch)
    same(step(state, keys[0])[1], eager[0])  # the state is as it was


@pytest.mark.slow
def test_a_step_copies_nothing(made: tuple[Path, pieces.Rows]) -> None:
    buffer, state = fbuf.datasets.open(made[0], view=Transition(stack=3), sampler=Prioritized())
    large = dataclasses.replace(buffer, capacity=4_000_000)
    spec, structure = buffer.storage.spec(state.rows)
    rows = large.storage.abstract(large.geometry, spec, structure)
    abstract = jax.eval_shape(functools.partial(fbuf._buffer._ahead.empty_state, large), rows)

    def step(state: Any, key: Any) -> Any:
        state, batch = large.sample(state, key, 8)
        state = large.update_priority(state, batch.index, jnp.ones(8))
        return large.sample(state, key, 8)

    fbuf.testing.assert_inplace(step, abstract, jax.ShapeDtypeStruct((2,), jnp.uint32))
    # and anchors of four million rows are made with the memory of a block
    other = dataclasses.replace(large, sampler=Uniform())
    made_of = jax.jit(lambda state: large.convert(other, state)).lower(abstract).compile().memory_analysis()
    assert made_of.temp_size_in_bytes < 500_000


def test_what_is_read(made: tuple[Path, pieces.Rows]) -> None:
    path, rows = made
    buffer, state = fbuf.datasets.open(path)
    for got, want in (
        (buffer.rows(state), np.arange(34)),
        (buffer.last(state, 5), np.arange(29, 34)),
        (buffer.get(state, jnp.array([[0, 33], [34, -1]], jnp.int32)), np.array([[0, 33], [34, -1]])),
    ):
        there = (want >= 0) & (want < 34)
        np.testing.assert_array_equal(got.mask, there)
        np.testing.assert_array_equal(got.index.ticket, there)  # one generation, for good
        for name, array in rows.items():
            np.testing.assert_array_equal(got.data[name][there], array[want[there]])
            assert not np.asarray(got.data[name])[~there].any()
    assert bool(buffer.can_sample(state)) and int(buffer.size(state)) == 34
    assert set(buffer.nbytes(state)) == {"device", "host", "disk"}
    keys = jax.random.split(jax.random.key(1), 3)
    many = jax.vmap(lambda key: buffer.peek(state, key, 4))(keys)
    same(jax.tree.map(lambda x: x[1], many), buffer.peek(state, keys[1], 4))
    plan = buffer.plan(fbuf.datasets._open.example(pieces.SCHEMA))
    assert plan.device == sum(x.nbytes for x in jax.tree.leaves(state)) and plan.peak_extend == 0


@pytest.mark.slow
def test_numbers_and_priorities(made: tuple[Path, pieces.Rows]) -> None:
    path, rows = made
    settings: Any = {"view": Transition(stack=2), "sampler": Prioritized(largest="held", uniform=0.2)}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    for i in range(3):
        drawn = []
        for buffer, state in (one, two):
            state = buffer.rebuild(buffer.set(state, alpha=0.3 + i))
            state, batch = buffer.sample(state, jax.random.key(i), BATCH, beta=0.5)
            state = buffer.update_priority(state, batch.index, jnp.arange(BATCH) - 3.0)
            drawn.append((buffer, state, batch))
        same(drawn[0][2], drawn[1][2])
        one, two = drawn[0][:2], drawn[1][:2]
    same(one[0].stats(one[1]), two[0].stats(two[1]))


def test_writes_are_refused_when_they_are_traced(made: tuple[Path, pieces.Rows], opened: Any) -> None:
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
        lambda state: fbuf.checked(buffer).extend(state, rows),
    ):
        for call in (verb, lambda state, verb=verb: jax.eval_shape(verb, state)):
            with pytest.raises(TypeError, match=r"rows of a data set stay as they are.*preprocess"):
                call(state)


@pytest.mark.slow
def test_replay_and_checked(made: tuple[Path, pieces.Rows], opened: Any) -> None:
    (_, rows), (buffer, state) = made, opened
    checked = fbuf.checked(buffer)
    state, batch = checked.sample(state, jax.random.key(0), BATCH)
    state = checked.update_priority(state, batch.index, jnp.ones(BATCH))
    with pytest.raises(ValueError, match="NaN or infinite"):
        checked.update_priority(state, batch.index, jnp.full(BATCH, jnp.nan))
    replay = fbuf.Replay(buffer, fbuf.datasets._open.example(pieces.SCHEMA), 0)
    batch = replay.sample(BATCH)
    replay = fbuf.Replay(buffer, fbuf.datasets.open(made[0], view=buffer.view, sampler=buffer.sampler)[1], 0)
    same(batch, replay.sample(BATCH))
    replay.update_priority(batch.index, np.ones(BATCH))
    with pytest.raises(TypeError, match="stay as they are"):
        replay.extend(rows)


def test_a_replay_of_what_was_opened_leaves_its_state_usable(opened: Any) -> None:
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
    with pytest.raises(TypeError, match="example is a BufferState; expected one row"):
        fbuf.Replay(live, live.init({"t": 0}))
    with pytest.raises(ValueError, match=r"other.storage is DataSet.*datasets.open\('/elsewhere'\)"):
        buffer.convert(dataclasses.replace(buffer, storage=DataSet("/elsewhere")), state)


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_another_view_of_the_same_rows(made: tuple[Path, pieces.Rows], traced: bool) -> None:
    buffer, state = fbuf.datasets.open(made[0])
    other = dataclasses.replace(buffer, view=fbuf.views.Sequence(3), sampler=Epoch())
    want = fbuf.datasets.open(made[0], view=other.view, sampler=other.sampler)[1]
    got = (jax.jit(buffer.convert, static_argnums=0) if traced else buffer.convert)(other, state)
    same(dataclasses.replace(got, rows=None), dataclasses.replace(want, rows=None))
    back = other.convert(buffer, got)
    same(dataclasses.replace(back, rows=None), dataclasses.replace(state, rows=None))


def test_prefetch(made: tuple[Path, pieces.Rows]) -> None:
    buffer, state = fbuf.datasets.open(made[0], prefetch=1, batch_size=BATCH)
    state, batch = buffer.sample(state, jax.random.key(0))
    same(batch, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)))
    for i in range(1, 4):
        state, batch = buffer.sample(state, jax.random.key(i))
        same(batch, buffer.peek(state, jax.random.key(i - 1)))
    assert fbuf.stores()[-1].nbytes > 2 * BATCH * 36  # rows that were read ahead


def test_many_threads_draw(made: tuple[Path, pieces.Rows]) -> None:
    buffer, state = fbuf.datasets.open(made[0])
    draw = jax.jit(lambda key: buffer.peek(state, key, BATCH))
    want, wrong = [jax.device_get(draw(jax.random.key(i))) for i in range(8)], []

    def work(turn: int) -> None:
        for i in range(16):
            got = jax.device_get(draw(jax.random.key((i + turn) % 8)))
            wrong.extend(
                1
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want[(i + turn) % 8]), strict=True)
                if (a != b).any()
            )

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------------ what it takes


def test_memory_of_a_row(made: tuple[Path, pieces.Rows]) -> None:
    def leaves(capacity: int, sampler: Any, view: Any) -> int:
        buffer = fbuf.Buffer(capacity, storage=DataSet("x"), writer=Frozen(), sampler=sampler, view=view)
        spec = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pieces.SCHEMA.leaves}
        rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(spec))
        state = jax.eval_shape(functools.partial(fbuf._buffer._ahead.empty_state, buffer), rows)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    for sampler in (Uniform(), Epoch(), fbuf.samplers.Staleness(4, unit=3)):
        assert leaves(1 << 22, sampler, Row()) - leaves(1 << 12, sampler, Row()) == 0
        counted = leaves(1 << 22, sampler, Transition(stack=4)) - leaves(1 << 12, sampler, Transition(stack=4))
        assert counted == ((1 << 22) - (1 << 12)) * (1 + 4 / _openrows.BLOCK)
    spare = leaves(1 << 22, Prioritized(uniform=0.1), Transition()) / (1 << 22)
    assert spare < 1 + 4 / _openrows.BLOCK + 4.6  # no log for the share that is drawn whatever its priority


def test_a_sampler_that_does_not_count_is_told_the_truth() -> None:
    geometry = fbuf.Buffer(8).geometry
    spec = {leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pieces.SCHEMA.leaves}
    buffer = fbuf.Buffer(8, storage=DataSet("x"), writer=Frozen(), view=Transition(), sampler=fbuf.samplers.Consume())
    assert not buffer.counted and buffer.geometry == geometry
    rows = buffer.storage.abstract(geometry, spec, jax.tree.structure(spec))
    state = jax.eval_shape(functools.partial(fbuf._buffer._ahead.empty_state, buffer), rows)
    assert state.anchors.before is None


@given(st.lists(st.booleans(), min_size=1, max_size=700), st.integers(0, 2**31 - 1))
def test_the_nth_open_row(is_open: list[bool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = 700  # of one shape, so that it compiles once
    flags = rng.integers(0, 256, capacity).astype(np.uint8) & 0xF7
    flags[: len(is_open)] |= np.where(is_open, np.uint8(8), np.uint8(0))
    want = np.flatnonzero(flags & 8)
    before = _counted(flags)
    np.testing.assert_array_equal(before, _before(flags))
    nth = rng.integers(0, max(len(want), 1), 16).astype(np.int32)
    got = np.asarray(_nth(flags, before, nth))
    assert ((got >= 0) & (got < capacity)).all()
    if len(want):
        np.testing.assert_array_equal(got, want[nth])


_counted, _nth = jax.jit(_openrows.counted), jax.jit(_openrows.nth)


def _before(flags: np.ndarray) -> np.ndarray:
    starts = range(0, len(flags), _openrows.BLOCK)
    return np.array([np.count_nonzero(flags[:start] & 8) for start in starts], np.int32)


# ------------------------------------------------------------------------------------------------------------ lifetime


def test_a_state_keeps_its_data_set_open(made: tuple[Path, pieces.Rows]) -> None:
    path = str(made[0])
    gc.collect()
    before = len(fbuf.stores())
    buffer, state = fbuf.datasets.open(path)
    twin = copy.deepcopy(state)
    assert len(fbuf.stores()) == before + 1 and _pieces.is_open(path)
    del state
    gc.collect()
    assert int(buffer.size(twin)) == 34
    buffer.peek(twin, jax.random.key(0), 3)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(twin)
    with pytest.raises(TypeError, match="cannot be vmapped"):
        jax.vmap(lambda state: buffer.sample(state, jax.random.key(0), 2))(
            jax.tree.map(lambda x: jnp.stack([x, x]), twin)
        )
    with pytest.raises(TypeError, match="cannot be traced"):
        jax.jit(lambda: buffer.init(fbuf.datasets._open.example(pieces.SCHEMA)))()
    jax.block_until_ready(twin)
    del twin
    gc.collect()
    assert len(fbuf.stores()) == before and not _pieces.is_open(path)


def test_parts_that_do_not_go_together(made: tuple[Path, pieces.Rows]) -> None:
    path = str(made[0])
    example = fbuf.datasets._open.example(pieces.SCHEMA)
    with pytest.raises(ValueError, match="a writer of no rows, or neither"):
        fbuf.Buffer(34, storage=DataSet(path))
    with pytest.raises(ValueError, match="a writer of no rows, or neither"):
        fbuf.Buffer(34, storage=Device(), writer=Frozen())
    with pytest.raises(ValueError, match="capacity 33 in 1 lanes, but .* has 34 rows"):
        fbuf.Buffer(33, storage=DataSet(path), writer=Frozen()).init(example)
    with pytest.raises(ValueError, match="in 2 lanes"):
        fbuf.Buffer(34, storage=DataSet(path), writer=Frozen(), lanes=2).init(example)
    with pytest.raises(ValueError, match="rows of .* are"):
        fbuf.Buffer(34, storage=DataSet(path), writer=Frozen()).init({**example, "reward": jnp.zeros(2)})
    for settings in ({"path": ""}, {"path": path, "memory": -1}, {"path": path, "cache": 1.5}):
        with pytest.raises((TypeError, ValueError), match="DataSet: "):
            DataSet(**settings)
    buffer = fbuf.Buffer(34, storage=DataSet(path), writer=Frozen())
    assert pickle.loads(pickle.dumps(buffer)) == buffer and "Frozen()" in repr(buffer)
    with pytest.raises(TypeError, match="rows elsewhere"):
        buffer.sample(fbuf.Buffer(34).init(example), jax.random.key(0), 2)


# ------------------------------------------------------------------------------------------------------- save and load


def test_save_and_load(made: tuple[Path, pieces.Rows], opened: Any, tmp_path: Path) -> None:
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


def test_load_where_it_moved(tmp_path: Path) -> None:
    was, now = tmp_path / "was", tmp_path / "now"
    pieces.make(was)
    buffer, state = fbuf.datasets.open(was, sampler=Epoch())
    state, _ = buffer.sample(state, jax.random.key(0), 3)
    fbuf.save(tmp_path / "saved", buffer, state)
    want = buffer.peek(state, jax.random.key(1), 5)
    was.rename(now)
    with pytest.raises(FileNotFoundError, match=r"no data set at .*storages.DataSet\('/its/path'\)"):
        fbuf.load(tmp_path / "saved")
    there = dataclasses.replace(buffer, storage=DataSet(str(now), memory=5))
    other, state = fbuf.load(tmp_path / "saved", there)
    assert other == there
    same(other.peek(state, jax.random.key(1), 5), want)
    pieces.make(was, seed=1)  # the same shapes, other rows
    with pytest.raises(fbuf.SchemaError, match="has identity .* made anew"):
        fbuf.load(tmp_path / "saved")
    with pytest.raises(ValueError, match="resize is 50, but the rows are those of a data set"):
        fbuf.load(tmp_path / "saved", resize=50)


# ------------------------------------------------------------------------------------------------------ kinds of rows


@pytest.mark.parametrize(
    ("leaves", "structure", "want"),
    [
        ({"a/b": ((), "int32"), "a/c": ((2,), "float32")}, None, lambda t: {"a": {"b": t, "c": None}}),
        ({"": ((), "int32")}, None, lambda t: t),
        ({"0": ((), "int32"), "1/x": ((), "bool")}, {"tuple": [0, {"dict": [["x", 1]]}]}, lambda t: (t, {"x": None})),
    ],
)
def test_any_structure(tmp_path: Path, leaves: Any, structure: Any, want: Any) -> None:
    schema = _pieces.Schema(leaves, structure)
    numbers = np.arange(6, dtype=np.int32)
    rows = {leaf.name: np.zeros((6, *leaf.shape), leaf.dtype) for leaf in schema.leaves}
    rows[schema.names[0]] = numbers
    pieces.write(tmp_path, 0, schema, rows)
    _pieces.finish(tmp_path, [_pieces.Used(0)])
    buffer, state = fbuf.datasets.open(tmp_path)
    data = buffer.rows(state).data
    assert jax.tree.structure(data) == jax.tree.structure(
        jax.tree.map(lambda x: 0, want(0), is_leaf=lambda x: x is None)
    )
    np.testing.assert_array_equal(jax.tree.leaves(data)[0], numbers)


def test_64_bits_need_x64(tmp_path: Path) -> None:
    pieces.write(tmp_path, 0, _pieces.Schema({"t": ((), "float64")}), {"t": np.arange(3.0)})
    _pieces.finish(tmp_path, [_pieces.Used(0)])
    with pytest.raises(ValueError, match="leaf 't' is float64, but x64 is off.*float32"):
        fbuf.datasets.open(tmp_path)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        buffer, state = fbuf.datasets.open(tmp_path)
        assert buffer.last(state, 1).data["t"].dtype == np.float64
