"""`samplers.Epoch`: every anchor once, whatever is written meanwhile."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._algorithms import random
from fbuf._buffer.write import dense_change
from fbuf.samplers import Epoch
from tests.support import epoch as support
from tests.support.epoch import Trial, buffer_of, check_inplace, empty
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.trees import changed, same


@pytest.mark.parametrize(("sampler", "view", "lanes"), [(Epoch(), "steps", 3), (Epoch(shuffle=False), "row", 3)])
def test_programs(sampler, view, lanes):
    """Extends of any size, clears, batches of two sizes; lanes out of step."""
    for seed in range(3):
        support.Trial(support.buffer_of(sampler, view, lanes), seed).run(80, (5, 13))


@functools.partial(jax.jit, static_argnums=0)
def twelve(buffer, state, key):
    """Batches of 256 in one scan."""
    return lax.scan(lambda s, k: buffer.sample(s, k, 256), state, jax.random.split(key, 12))


@pytest.mark.parametrize("held", [1, 1000, 1024, 1025, 3000])
def test_one_epoch_is_everyone_once(held):
    """On both sides of the line between shuffles and keyed orders."""
    state, oracle, drawn = support.filled(support.LARGE, held), support.Oracle(Epoch()), []
    for key in range(2):
        state, batch = twelve(support.LARGE, state, jax.random.key(key))
        for data, mask in zip(np.asarray(batch.data), np.asarray(batch.mask), strict=True):
            oracle.sample(range(held), 256, data[mask].tolist())
            drawn += data[mask].tolist()
    first, second = drawn[:held], drawn[held : 2 * held]
    assert sorted(first) == sorted(second) == list(range(held))
    assert oracle.begun == -(-24 // -(-held // 256))
    assert held == 1 or first != second != sorted(second)
    oracle.check(range(held), support.LARGE, state)


def test_many_closed_in_a_row_are_passed_over():
    """With 20 of 3,000 anchors left, one batch draws them all; with none left, a new epoch begins."""
    state, batch = support.sample(support.LARGE, support.filled(support.LARGE, 3000), jax.random.key(0), 100)
    first = set(np.asarray(batch.data).tolist())
    state = support.arrive(support.LARGE, state, 3000, 2980)
    after, batch = support.sample(support.LARGE, state, jax.random.key(1), 100)
    wanted = set(range(2980, 3000)) - first
    assert set(np.asarray(batch.data)[np.asarray(batch.mask)].tolist()) == wanted
    support.is_draw(batch, len(wanted), 3000)
    assert (int(support.LARGE.stats(after)["epoch"]), int(support.LARGE.stats(after)["epoch_left"])) == (1, 0)
    state = support.arrive(support.LARGE, state, 5980, 20)
    after, batch = support.sample(support.LARGE, state, jax.random.key(1), 100)
    support.is_draw(batch, 100, 3000)
    assert (int(support.LARGE.stats(after)["epoch"]), int(support.LARGE.stats(after)["epoch_left"])) == (2, 2900)


@pytest.mark.parametrize(("held", "drop_last"), [(10, False), (10, True), (8, False), (3, True), (0, False)])
def test_a_loop_until_the_last_batch_is_one_epoch(held, drop_last):
    """The program of a jitted PPO update: batches until `last`, without counting them."""
    buffer = fbuf.Buffer(capacity=10, sampler=Epoch(drop_last=drop_last))

    @jax.jit
    def epoch(state, key):
        def draw(carry):
            state, _, times = carry
            state, batch = buffer.sample(state, key, 4)
            return state, batch.last, times.at[batch.index.slot].add(1, mode="drop")

        return lax.while_loop(lambda carry: ~carry[1], draw, (state, False, np.zeros(10, np.int32)))

    state, _, times = epoch(support.filled(buffer, held), jax.random.key(0))
    assert np.asarray(times)[held:].sum() == 0 and times.max() <= 1
    assert times.sum() == (held // 4 * 4 if drop_last else held)
    assert int(buffer.stats(state)["epoch"]) == (held >= (4 if drop_last else 1))


def test_peek_leaves_the_epoch_where_it_is():
    state, _ = support.sample(support.SMALL, support.filled(support.SMALL, 10), jax.random.key(0), 4)
    seen = support.SMALL.peek(state, jax.random.key(1), 4)
    after, batch = support.sample(support.SMALL, state, jax.random.key(2), 4)
    same(seen, batch)  # in the middle of an epoch keys make no difference
    assert int(support.SMALL.stats(after)["epoch_left"]) == 2


def test_everyone_is_as_likely_at_every_place_and_so_is_every_pair():
    support.check_places(Epoch(), 7, 8_000)


@pytest.mark.more
@pytest.mark.in_place
def test_a_scan_copies_nothing():
    support.check_inplace("steps", "es")


def test_counts_do_not_overflow():
    """The longest lane there can be, overwritten again and again within one epoch."""
    length = 2**31 - 2**24 - 1
    geometry = fbuf.Buffer(capacity=length).geometry
    state = Epoch().init(geometry, dense=True)
    whole = np.full((1,), length, np.int32)
    position = dataclasses.replace(state.position, start=whole, closed=whole - 3)
    state = dataclasses.replace(state, held=whole, position=position)
    slots = np.arange(5, dtype=np.int32)[:, None]
    change = dense_change(slots, np.ones((5, 1), bool), None)
    for _ in range(3):
        state = Epoch().change(state, change, geometry, np.int32(0))
        assert state.held.tolist() == state.position.closed.tolist() == [length]


def test_arguments_must_be_bools():
    for name, value in itertools.product(("shuffle", "drop_last"), ("yes", 1, None)):
        raises(TypeError, f"Epoch: {name} is {value!r}; expected a bool", Epoch, **{name: value})


def test_at_the_end_of_an_epoch_every_row_can_be_drawn():
    state = support.filled(support.SMALL, 4)
    state, _ = support.sample(support.SMALL, state, jax.random.key(0), 4)
    assert support.SMALL.summary(state).effective_size == 4


@pytest.mark.more
def test_programs_without_shuffling():
    for seed in range(3, 6):
        Trial(buffer_of(Epoch(shuffle=False, drop_last=True), "steps", 3), seed).run(80, (1, 5, 40))


@pytest.mark.more
def test_programs_with_keyed_orders(monkeypatch):
    """As if true shuffles ended at 5 anchors: small buffers then cross over again and again."""
    monkeypatch.setattr(random, "SHUFFLED", 5)
    for seed in range(3):
        # A length that no other test has: verbs compiled for it know the other line.
        Trial(buffer_of(Epoch(drop_last=True), "row", None, length=12), seed).run(80, (5, 13))


@pytest.mark.more
def test_eager_draws_of_an_epoch_copy_nothing_that_grows():
    buffer = buffer_of(Epoch(), "steps", lanes=2)
    state = empty(buffer)
    moved = changed(state, buffer.sample(state, jax.random.key(1), 7)[0])
    assert all(name.startswith((".sampler.position", ".header")) for name in moved)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_programs_of_every_kind(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


test_in_place_checks = pytest.mark.in_place(
    checks(exhaustive=[(check_inplace, [("row", "es"), ("row", "ses"), ("steps", "ses")])])
)
