"""Samplers with further options, sizes and views."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import random
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness
from fbuf.views import Transition
from tests.samplers.test_staleness import check_versions
from tests.support import priorities
from tests.support.epoch import Pool, Trial, buffer_of, check_places, empty
from tests.support.priorities import KEY, index_of
from tests.support.tables import checks, one_of
from tests.support.trees import changed
from tests.support.uniformity import chi_square_z, lanes_out_of_step

pytestmark = pytest.mark.more

case = one_of((Consume(3), Transition(n_step=2, autoreset="same_step"), 2))


def test_no_row_is_drawn_too_often(case):
    sampler, view, lanes = case
    buffer = fbuf.Buffer(11 * (lanes or 1), sampler=sampler, view=view, lanes=lanes)
    Trial(buffer, 0, Pool).run(60, (2, 7, 30))


def test_weights_too_small_for_a_float():
    """A learner hundreds of half-lives ahead still draws what is not beyond the maximum."""
    sampler = Staleness(20, version="version", decay="exponential", half_life=0.05)
    buffer = fbuf.Buffer(10, sampler=sampler)
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([0, 0, 1, 1])})
    for version, drawn in ((1, {1}), (20, {1}), (21, {1}), (22, set())):
        now = buffer.set(state, version=version)
        batch = buffer.peek(now, jax.random.key(0), 64)
        assert set(batch.data["version"][batch.mask].tolist()) == drawn
        assert bool(buffer.can_sample(now)) == bool(drawn)


def test_versions_far_apart():
    buffer = fbuf.Buffer(10, sampler=Staleness(5, version="version"))
    state = buffer.extend(buffer.init({"version": 0}), {"version": jnp.array([-(2**31), -7, 3])})
    assert set(buffer.peek(state, jax.random.key(0), 64).data["version"].tolist()) == {3}
    assert not bool(buffer.can_sample(buffer.set(state, version=2**31 - 1)))


def test_runs_of_tiny_weight_leave_the_other_draws_alone():
    """Sums of float32 in another order may differ by a hair: what may not be drawn is not drawn all the same."""
    sampler = Staleness(400, version="version", decay="exponential", half_life=3, runs=500)
    buffer = fbuf.Buffer(5000, lanes=5, sampler=sampler)
    state = buffer.init({"version": jnp.int32(0)})
    version = np.sort(np.random.default_rng(0).integers(0, 450, (1000, 5)).astype(np.int32), axis=0)
    state = buffer.set(buffer.extend(state, {"version": version}), version=470)
    batch = buffer.peek(state, jax.random.key(0), 2**18)
    assert bool(batch.mask.all()) and int(batch.data["version"].min()) >= 70
    assert (np.asarray(batch.probability) > 0).all()


ranked = one_of(True)
stratified = one_of(False)


def test_a_share_of_a_buffer_with_lanes_ignores_priorities(ranked, stratified):
    sampler = (Ranked if ranked else Prioritized)(alpha=1.0, uniform=0.3, stratified=stratified)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots)
    errors = np.random.default_rng(6).exponential(size=len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index_of(buffer, state, slots.tolist()), errors)
    batch = jax.device_get(buffer.peek(state, KEY, 2**17))
    chances = np.zeros(buffer.capacity)
    chances[batch.index.slot] = batch.probability
    if not ranked:
        expected = 0.7 * (errors.astype(float) + 1e-6) / (errors.astype(float) + 1e-6).sum() + 0.3 / len(slots)
        np.testing.assert_allclose(chances[slots], expected, rtol=1e-5)
    assert abs(chances.sum() - 1) < 1e-4
    z = chi_square_z(np.bincount(batch.index.slot, minlength=buffer.capacity), chances / chances.sum())
    assert z < 4
    assert stratified or z > -4


@pytest.mark.parametrize("normalize", [None, "batch", "buffer"])
def test_weights_of_draws_without_replacement(normalize):
    """With beta = 1 the weighted mean over the batch is that of all rows; normalized, it is a multiple of it."""
    priority = np.random.default_rng(2).exponential(size=40)
    buffer, state = priorities.filled(Prioritized(1.0, 1.0, 0.0, normalize=normalize, replace=False), priority)
    batches = jax.device_get(jax.jit(jax.vmap(lambda key: buffer.peek(state, key, 12)))(jax.random.split(KEY, 8000)))
    value = np.random.default_rng(3).normal(size=40) + 1
    weight = batches.weight.astype(np.float64)
    if normalize is None:
        means = (weight * value[batches.data]).mean(axis=1)
        assert abs(means.mean() - value.mean()) < 5 * means.std() / np.sqrt(len(means))
        np.testing.assert_allclose(weight, 1 / (40 * batches.probability.astype(np.float64)), rtol=1e-5)
    elif normalize == "batch":
        np.testing.assert_allclose(weight.max(axis=1), 1.0)
    else:
        least = np.argmin(priority)
        assert weight.max() <= 1 + 1e-5
        np.testing.assert_allclose(weight[batches.data == least], 1.0, rtol=1e-5)


def test_more_programs():
    for seed in range(3, 6):
        Trial(buffer_of(Epoch(shuffle=False, drop_last=True), "steps", 3), seed).run(80, (1, 5, 40))


def test_programs_with_keyed_orders(monkeypatch):
    """As if true shuffles ended at 5 anchors: small buffers then cross over again and again."""
    monkeypatch.setattr(random, "SHUFFLED", 5)
    for seed in range(3):
        # A length that no other test has: verbs compiled for it know the other line.
        Trial(buffer_of(Epoch(drop_last=True), "row", None, length=12), seed).run(80, (5, 13))


def test_eager_draws_of_an_epoch_copy_nothing_that_grows():
    buffer = buffer_of(Epoch(), "steps", lanes=2)
    state = empty(buffer)
    moved = changed(state, buffer.sample(state, jax.random.key(1), 7)[0])
    assert all(name.startswith((".sampler.turn", ".header")) for name in moved)


VERSIONS = [(Staleness(2, version="version", decay="none"), [1, 1, 1, 0])]
VERSIONS += [(Staleness(0, version="version"), [1, 0, 0, 0])]
test_checks = checks((check_places, [(Consume(), 3000)]), (check_versions, VERSIONS))
