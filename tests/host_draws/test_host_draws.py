"""Batches that `Replay` draws in NumPy are those that its jitted draws return."""

import copy
import dataclasses
import functools
import itertools
import pickle
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host_draws import anchors, draws, reads, rings
from fbuf._replay import engine
from tests.support.interrupts import at_every_moment
from tests.support.refusals import raises
from tests.support.tables import by_tier
from tests.support.threads import handled
from tests.support.trees import same
from tests.support.two_replays import ROW, VIEWS, compare, make_pair, rows_of

EXAMPLE = pickle.loads(pickle.dumps(ROW))  # an actor's: its dtypes are not NumPy's own objects


def row(n):
    return rows_of(np.random.default_rng(n))


def with_lap(replay, lap):
    """Let every lane of an empty replay be in this lap."""
    state = replay.state
    ring = dataclasses.replace(state.ring, lap=jnp.full_like(state.ring.lap, lap))
    replay.state = state.replace(ring=ring)


@pytest.mark.parametrize(
    ("capacity", "lanes", "lap", "impl"),
    by_tier((37, None, 1, "threefry2x32"), more=[(40, 2, 2**32 - 2, "threefry2x32"), (9, 1, 1, "rbg")]),
)
def test_batches_in_numpy_are_those_of_jax(capacity, lanes, lap, impl):
    with jax.default_prng_impl(impl):
        pair = make_pair("device", "uniform", "row", lanes, capacity)
    assert pair[0]._engine.host is not None
    compare(pair, 50, sizes=(7, 7, 12), begin=functools.partial(with_lap, lap=lap))


@pytest.mark.parametrize(("view", "lanes"), by_tier(("reset step", 2), more=[("step", None), ("final", 1)]), ids=str)
def test_transitions_in_numpy_are_those_of_jax(view, lanes):
    pair = make_pair("device", "uniform", view, lanes, 24)
    assert pair[0]._engine.host is not None
    compare(pair, 50, sizes=(7, 7, 12))


@pytest.mark.more
@pytest.mark.parametrize("sampler", by_tier("uniform", more=["prioritized"]))
def test_lanes_that_are_alike_are_drawn_as_others(sampler):
    pair, random = make_pair("device", sampler, "step", 8, 8 * 80), np.random.default_rng(0)
    block = pair[0]._engine.block
    assert block is not None and block.lengths[:2] == [16, 64]
    for step in range(150):
        row = rows_of(random, 8)
        if step % 32 > 3:
            row["done"][:] = step % 7 == 0
        for replay in pair:
            replay.add(row)
        if step in range(20, 30) or (step > 75 and step not in range(90, 140)):
            same(*(replay.sample(40, to="numpy") for replay in pair))
            assert block.count < 48  # many rows are written before a draw
    same(*(replay.state for replay in pair))


def test_rows_that_replace_rows_of_the_same_state_are_drawn():
    buffer = fbuf.Buffer(50, view=VIEWS["final"])
    replay, other = fbuf.Replay(buffer, EXAMPLE), fbuf.Replay(buffer, EXAMPLE)
    before = [(each.state, each._engine.key)[0] for each in (replay, other)]
    for n in range(3):
        replay.add(row(n) | {"done": np.bool_(True)})
    replay.sample(4, to="numpy")
    replay.state, other.state = before
    other._engine.key = replay._engine.key
    for n in range(5):
        for each in (replay, other):
            each.add(row(n))
    same(replay.sample(9, to="numpy"), jax.device_get(other.sample(9)))


def test_masked_entries_are_zero():
    replay = fbuf.Replay(fbuf.Buffer(4, sampler=fbuf.samplers.Prioritized(replace=False)), {"t": np.int32(0)})
    replay.extend({"t": np.arange(1, 5)})
    with pytest.warns(RuntimeWarning, match="batch_size is 6, but only 4 rows"):
        batch = replay.sample(6, to="numpy")
    assert batch.mask.sum() == 4 and not batch.data["t"][~batch.mask].any()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:.*has each at most once:RuntimeWarning")
@pytest.mark.parametrize("sampler", by_tier("uniform", more=["prioritized", "epoch"]))
def test_what_is_read_of_a_batch_later_is_as_it_was_drawn(sampler):
    pair, random = make_pair("device", sampler, "step", None, 40), np.random.default_rng(1)
    rows = [rows_of(random) for _ in range(20)]
    ours, other = pair
    for _ in range(3):
        for row in rows:
            for each in pair:
                each.add(row)
        for size in (8, 60):  # an epoch has fewer
            batch, expected = ours.sample(size, to="numpy"), jax.device_get(other.sample(size))
            for row in 5 * rows:  # its slots are written again
                for each in pair:
                    each.add(row)
            assert "weight" in dir(batch)
            copies = [copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))]
            for each in (batch, *copies):
                same(each, expected)
            assert batch.index is batch.index and copies[0].weight is batch.weight
            batch.weight[:], batch.mask[0] = 7, False
            same(copies[2], expected)
            same(copies[1], expected)


@pytest.mark.parametrize(
    ("view", "lanes"), by_tier(("final", None), more=[("final", 2), ("row", None), ("step", None)])
)
def test_an_error_at_any_moment_of_a_draw_changes_no_other(view, lanes):
    pair = ours, theirs = make_pair("device", "uniform", view, lanes, 100)
    numbers, moments, lead = itertools.count(), 0, () if lanes is None else (lanes,)

    def add() -> Any:
        for number in itertools.islice(numbers, 3 + moments % 30):
            new = rows_of(np.random.default_rng(number), *lead) | {"done": np.full(lead, number % 5 == 0)}
            for replay in pair:
                replay.add(new)
        return ours._engine.key

    key, modules = add(), {anchors, draws, engine, reads, rings}
    for ended in at_every_moment(lambda: ours.sample(4, to="numpy"), modules):
        if ours._engine.key is not key:  # the error came after the draw
            theirs.sample(4, to="numpy")
        same(*(replay.sample(4, to="numpy") for replay in pair))
        moments += ended
        key = add()
    assert moments > 50


def test_a_handler_of_interrupts_waits_for_the_end_of_a_draw(monkeypatch):
    pair = ours, _ = make_pair("device", "uniform", "row", None, 50)
    for replay in pair:
        replay.add(row(0))
        replay.add(row(1))
    compute, states = draws.HostDraws._bits, []
    monkeypatch.setattr(draws.HostDraws, "_bits", lambda *of: (signal.raise_signal(signal.SIGINT), compute(*of))[1])
    with handled(signal.SIGINT, lambda *_: states.append(ours.state)):
        same(*(replay.sample(9, to="numpy") for replay in pair))
    assert len(states) == 1


@pytest.mark.more
def test_an_error_of_a_draw_from_one_state_changes_none_from_another():
    pair = ours, theirs = make_pair("device", "uniform", "row", None, 50)
    states = [ours.buffer.extend(ours.buffer.init(ROW), rows_of(np.random.default_rng(n), n)) for n in (7, 33)]

    def draw(number: int) -> None:
        for replay in pair:
            replay.state = states[number]
        theirs._engine.key = ours._engine.key
        if number == 0:
            same(*(replay.sample(4, to="numpy") for replay in pair))

    draw(0)
    draw(1)
    for _ in at_every_moment(lambda: ours.sample(4, to="numpy"), {draws, reads, rings}):
        draw(0)
        draw(1)


def test_tensors_are_the_caller_s():
    torch = pytest.importorskip("torch")
    one, other = (fbuf.Replay(fbuf.Buffer(50), EXAMPLE) for _ in range(2))
    for n in range(30):
        one.add(row(n))
        other.add(row(n))
    for _ in range(3):
        batch, arrays = one.sample(6, to="torch"), other.sample(6, to="numpy")
        assert isinstance(batch.data["reward"], torch.Tensor) and batch.index.generation.dtype == torch.uint32
        same(jax.tree.map(lambda leaf: leaf.numpy(), batch), arrays)
        batch.data["reward"] += 1  # changes neither rows nor later batches


@pytest.mark.in_place
@pytest.mark.parametrize("view", ["row", "final"])
def test_writes_after_draws_are_in_place(view):
    replay = fbuf.Replay(fbuf.Buffer(5000, view=VIEWS[view]), EXAMPLE)
    replay.extend({name: np.repeat(leaf[None], 3, 0) for name, leaf in row(0).items()})
    before = replay.state.rows["reward"].unsafe_buffer_pointer()
    for n in range(4):
        batch = replay.sample(8, to="numpy")
        replay.extend({name: np.repeat(leaf[None], 3, 0) for name, leaf in row(n).items()})
        assert replay.state.rows["reward"].unsafe_buffer_pointer() == before and batch.mask.all()


@pytest.mark.in_place
def test_a_state_taken_before_a_draw_is_still_donated():
    replay = fbuf.Replay(fbuf.Buffer(5000), EXAMPLE)
    replay.extend({name: np.repeat(leaf[None], 3, 0) for name, leaf in row(0).items()})
    state = replay.state
    before = state.rows["reward"].unsafe_buffer_pointer()
    replay.sample(8, to="numpy")
    replay.state = jax.jit(replay.buffer.add, donate_argnums=0)(state, row(1))
    assert replay.state.rows["reward"].unsafe_buffer_pointer() == before


def test_rows_may_be_of_a_class_that_checks_its_values():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Step:
        x: Any

        def __post_init__(self):
            if isinstance(self.x, int):
                raise TypeError("x is not an array")

    replay = fbuf.Replay(fbuf.Buffer(50), Step(np.zeros(2, np.float32)))
    replay.add(Step(np.ones(2, np.float32)))
    assert replay.sample(3, to="numpy").data.x.tolist() == [[1, 1]] * 3


def test_draws_are_clean_under_transfer_guards():
    replay = fbuf.Replay(fbuf.Buffer(50), EXAMPLE)
    replay.add(row(0))
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            replay._engine.host._next = iter(())  # as after the last of the random bits
            assert replay.sample(3, to="numpy").mask.all()
    replay.stats()  # writes the row
    with jax.transfer_guard("disallow"):
        assert replay.sample(3).mask.shape == (3,)


def test_other_buffers_are_drawn_by_jax():
    for buffer, example in (
        (fbuf.Buffer(50), {"x": jnp.zeros(2, jnp.bfloat16)}),
        (fbuf.Buffer(50), {"x": jnp.zeros(2, jnp.float8_e5m2)}),
        (fbuf.prioritized(50, on="host"), EXAMPLE),
        (fbuf.Buffer(50, sampler=fbuf.samplers.Consume()), EXAMPLE),
        (fbuf.Buffer(50, view=fbuf.views.Sequence(3, episode_end=(), episode="action")), EXAMPLE),
    ):
        assert fbuf.Replay(buffer, example)._engine.host is None
    raises(ValueError, "no row can be sampled", lambda: fbuf.Replay(fbuf.Buffer(50), EXAMPLE).sample(4, to="numpy"))


class Doubled:
    def read(self, rows, reads):
        leaves, ok = super().read(rows, reads)
        return [leaf * 2 for leaf in leaves], ok


class DoubledDevice(Doubled, fbuf.storages.Device):
    pass


class DoubledHost(Doubled, fbuf.storages.Host):
    pass


class DoubledRow(fbuf.views.Row):
    def assemble(self, spec, structure, arrays, window):
        return super().assemble(spec, structure, [array * 2 for array in arrays], window)


@pytest.mark.parametrize(
    "part", by_tier({"storage": DoubledHost()}, more=[{"storage": DoubledDevice()}, {"view": DoubledRow()}])
)
def test_what_derived_parts_read_is_drawn(part):
    pair = [fbuf.Replay(fbuf.Buffer(8, **part), {"t": 0}) for _ in range(2)]
    for replay in pair:
        replay.extend({"t": np.arange(8)})
    same(pair[0].sample(5, to="numpy"), jax.device_get(pair[1].sample(5)))


@pytest.mark.more
@pytest.mark.optimized
def test_batches_in_numpy_are_those_of_jax_as_users_compile_them():
    test_batches_in_numpy_are_those_of_jax(37, None, 1, "threefry2x32")
    test_transitions_in_numpy_are_those_of_jax("reset step", 2)
