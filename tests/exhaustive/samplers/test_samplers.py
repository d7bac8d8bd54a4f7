"""Samplers with every option, many states at once, and in place."""

# ruff: noqa: F401, F811

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import sum_tree
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness
from fbuf.views import Row, Sequence, Transition
from tests.more.samplers.test_samplers import (
    test_a_share_of_a_buffer_with_lanes_ignores_priorities,
    test_no_row_is_drawn_too_often,
)
from tests.samplers.test_prioritized import (
    test_draws_by_rank,
    test_ranks_are_kept_and_found,
    test_sets_are_those_of_drawing_one_after_another,
    test_traced_numbers_are_brought_into_range,
)
from tests.support import priorities, same_step
from tests.support.epoch import (
    FIELDS,
    LARGE,
    Trial,
    arrive,
    buffer_of,
    check_inplace,
    check_places,
    empty,
    filled,
    rows_of,
    sample,
)
from tests.support.inplace import assert_draw_write_draw
from tests.support.priorities import KEY, index_of, races
from tests.support.tables import checks, one_of
from tests.support.trees import same
from tests.support.uniformity import lanes_out_of_step

case = one_of(
    (Consume(), Row(), None, True),
    (Consume(), same_step.Transition(n_step=2, stack=3), None, False),
    (Consume(), same_step.Sequence(3, boundary="mask"), 3, True),
)


@pytest.mark.optimized
def test_steps_are_in_place():
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(4), view=same_step.Transition(n_step=3, stack=4))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


def test_many_at_once_are_as_each_alone():
    buffer = fbuf.Buffer(12, sampler=Consume(2), view=same_step.Transition())
    states = [buffer.extend(empty(buffer), rows_of(np.random.default_rng(i), 9)) for i in range(3)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *states)
    keys = jax.random.split(jax.random.key(0), 3)
    sample = jax.jit(jax.vmap(lambda s, k: buffer.sample(s, k, 5)))
    for _ in range(3):
        together, batches = sample(together, keys)
        for i in range(3):
            states[i], one = buffer.sample(states[i], keys[i], 5)
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b, i=i: np.array_equal(a[i], b), batches, one)))


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


def test_rows_of_another_sampler():
    """`convert` tells the sampler of rows that arrived before it."""
    view = same_step.Transition(n_step=3)
    uniform = fbuf.Buffer(capacity=12, view=view)
    trial = Trial(dataclasses.replace(uniform, sampler=Epoch()), 0)
    trial.buffer, trial.state = uniform, empty(uniform)
    for _ in range(3):
        trial.extend(7)
    trial.buffer = dataclasses.replace(uniform, sampler=Epoch())
    trial.state = uniform.convert(trial.buffer, trial.state)
    trial.model = trial.model.convert(trial.buffer)
    trial.sample(4)
    trial.extend(1)
    trial.sample(40)


def test_vmap_over_states():
    """None, few (shuffled), many (a keyed order), and all overwritten: each as if alone."""
    buffer = LARGE
    counts = (0, 5, 700, 3000)
    alone = [filled(buffer, count) for count in counts]
    for i in (1, 2, 3):
        alone[i] = sample(buffer, alone[i], jax.random.key(i), 4)[0]
    alone[3] = arrive(buffer, alone[3], 0, 2980)
    together = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    some = jnp.arange(2, dtype=jnp.int32)

    def step(state, key):
        state, batch = buffer.sample(state, key, 300)
        return buffer.extend(state, some), batch

    many, one = jax.jit(jax.vmap(step)), jax.jit(step)
    for turn in range(4):
        keys = jax.random.split(jax.random.key(turn), len(counts))
        together, batches = many(together, keys)
        for i, key in enumerate(keys):
            alone[i], batch = one(alone[i], key)
            same(jax.tree.map(lambda x, i=i: x[i], batches), batch)
    same(together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


test_checks = checks((check_places, [(2000, 20_000)]))
test_optimized_checks = pytest.mark.optimized(
    checks((check_inplace, [("row", "es"), ("row", "ses"), ("steps", "ses")]))
)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("sampler", "view"),
    [(Staleness(8, unit=100), Row()), (Staleness(8, version="action"), same_step.Sequence(16, boundary="mask"))],
)
def test_steps_are_in_place_of_staleness(sampler, view):
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


def test_runs_that_are_forgotten():
    """Two actors in one lane: each change begins a run."""
    version = jnp.tile(jnp.array([7, 8]), 40)
    rows = {"i": jnp.arange(80), "version": version}
    for runs, left in ((None, 64), (2, 2), (10, 10)):
        buffer = fbuf.Buffer(100, sampler=Staleness(1, version="version", runs=runs))
        state = buffer.extend(buffer.init({"i": jnp.int32(0), "version": jnp.int32(0)}), rows)
        batch = buffer.peek(state, jax.random.key(0), 4096)
        assert sorted(set(batch.data["i"].tolist())) == list(range(80 - left, 80))
        assert int(buffer.stats(state)["anchors_fresh"]) == left


far_apart = one_of(False)
stratified = one_of(True)
ranked = one_of(False, True)
capacity = one_of(1, 5, 512, 513, 40_000)
sampler = one_of(Ranked(uniform=0.1, normalize="buffer"))


@pytest.mark.parametrize(("size", "batch_size", "trials"), [(100, 30, 4000), (5000, 64, 3000)])
def test_chances_make_sums_unbiased(size, batch_size, trials):
    """The sum of f / chance over the batch is that of f over all, whatever f: here of who holds much and who little."""
    leaf = np.random.default_rng(1).pareto(1.2, size).astype(np.float32)
    leaf[::10] = 0
    tree = sum_tree.rebuild(leaf)
    got = jax.device_get(races(tree, jax.random.split(jax.random.key(1), trials), batch_size, size))
    assert got.mask.all() and (leaf[got.slot] > 0).all()
    assert all(len(set(s)) == batch_size for s in got.slot.tolist())
    order = np.argsort(leaf)
    for part in (order[-10:], order[-size // 3 :], np.flatnonzero(leaf)):
        of_part = np.isin(got.slot, part) / got.chance.astype(np.float64)
        sums = of_part.sum(axis=1)
        assert abs(sums.mean() - np.sum(leaf[part] > 0)) < 5 * sums.std() / np.sqrt(trials)


@pytest.mark.parametrize("view", [fbuf.views.Row(), same_step.Transition()])
def test_all_zero_without_replacement_is_a_part_of_all(view):
    sampler = Prioritized(eps=0.0, replace=False, beta=1.0)
    if isinstance(view, fbuf.views.Row):
        buffer, state = priorities.filled(sampler, np.zeros(50))
        can = np.ones(50, bool)
    else:
        buffer, state, can = lanes_out_of_step(sampler, length=31)
        slots = np.flatnonzero(can).tolist()
        state = buffer.update_priority(state, index_of(buffer, state, slots), np.zeros(len(slots), np.float32))
    counts = np.zeros(buffer.capacity)
    for key in jax.random.split(KEY, 60):
        batch = jax.device_get(buffer.peek(state, key, 20))
        assert len(set(batch.index.slot.tolist())) == 20 and can[batch.index.slot].all()
        np.testing.assert_allclose(batch.weight, 1.0)
        counts += np.bincount(batch.index.slot, minlength=buffer.capacity)
    assert np.all(counts[can] > 0) and not counts[~can].any()
