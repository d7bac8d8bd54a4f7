"""Samplers with every option, many states at once, and in place."""

# ruff: noqa: F401, F811

import jax
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import sum_tree
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness
from fbuf.views import Row, Sequence, Transition
from tests.samplers import test_prioritized as quick
from tests.samplers import test_samplers as further
from tests.support import priorities, same_step
from tests.support.epoch import FIELDS, Trial, buffer_of, check_inplace
from tests.support.inplace import assert_draw_write_draw
from tests.support.priorities import KEY, index_of, races
from tests.support.tables import checks, one_of, select_tests
from tests.support.uniformity import lanes_out_of_step

pytestmark = pytest.mark.exhaustive

case = one_of(
    (Consume(), Row(), None),
    (Consume(2), Row(), None),
    (Consume(), same_step.Transition(n_step=2, stack=3), 3),
)


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


PARTS = [(Consume(4), same_step.Transition(n_step=3, stack=4)), (Staleness(8, unit=100), Row())]
PARTS += [(Staleness(8, version="action"), same_step.Sequence(16, boundary="mask"))]


@pytest.mark.in_place
@pytest.mark.parametrize(("sampler", "view"), PARTS)
def test_steps_are_in_place(sampler, view):
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


test_in_place_checks = pytest.mark.in_place(checks((check_inplace, [("row", "es"), ("row", "ses"), ("steps", "ses")])))


far_apart = one_of(False)
stratified = one_of(True)
ranked = one_of(False, True)
capacity = one_of(1, 5, 512, 513, 40_000)
sampler = one_of(Ranked(uniform=0.1, normalize="buffer"))
globals().update(
    select_tests(quick, "far_apart", "stratified", "capacity", "sampler"), **select_tests(further, "case", "ranked")
)


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
