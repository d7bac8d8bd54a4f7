"""Chi-square tests of who gets drawn: every anchor as often as its probability says, at fixed seeds.

A statistic far too small is as suspicious as one far too large (draws that are not independent), so both sides count.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _anchors, _population

DRAWS = 2**18
MANY = 2**20


def chi_square_z(counts: np.ndarray, chances: np.ndarray) -> float:
    """The statistic as a standard normal number (Wilson and Hilferty 1931)."""
    assert not counts[chances == 0].any()
    counts, chances = counts[chances > 0], chances[chances > 0]
    expected = chances * counts.sum()
    freedom = len(counts) - 1
    statistic = np.sum((counts - expected) ** 2 / expected)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def slots_drawn(buffer: fbuf.Buffer, state: Any, seed: int, draws: int) -> np.ndarray:
    """Times each slot was drawn."""
    batch = buffer.peek(state, jax.random.key(seed), draws)
    assert bool(batch.mask.all())
    return np.bincount(np.asarray(batch.index.slot), minlength=buffer.capacity)


def rows(rng: np.random.Generator, shape: tuple[int, ...], often: float) -> dict[str, jax.Array]:
    """Rows of flags and next to nothing else."""
    return {
        "obs": jnp.zeros(shape, jnp.uint8),
        "action": jnp.zeros(shape, jnp.int8),
        "reward": jnp.zeros(shape, jnp.float32),
        "terminated": jnp.asarray(rng.random(shape) < often),
        "truncated": jnp.asarray(rng.random(shape) < often),
    }


@functools.cache
def lanes_out_of_step(sampler: Any, length: int = 301) -> tuple[fbuf.Buffer, Any, np.ndarray]:
    """Three lanes: one fills a fifth of its ring, one half, one goes round; with the slots that can be drawn."""
    rng = np.random.default_rng(5)
    view = fbuf.views.Transition(n_step=3, stack=4)
    buffer = fbuf.Buffer(capacity=3 * length, lanes=3, view=view, sampler=sampler)
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], rows(rng, (1, 3), 0.0)))
    for _ in range(8):
        mask = jnp.asarray(rng.random((100, 3)) < np.array([0.08, 0.2, 0.7]))
        state = buffer.extend(state, rows(rng, (100, 3), 0.05), mask=mask)
    return buffer, state, drawable(state)


def drawable(state: Any) -> np.ndarray:
    return (np.asarray(state.anchors.flags) & _anchors.OPEN) != 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("arrived", [700, 2500])
def test_uniform_rows(seed, arrived):
    buffer = fbuf.Buffer(capacity=1000)
    state = buffer.extend(buffer.init(jnp.float32(0)), jnp.zeros(arrived, jnp.float32))
    chances = np.zeros(1000)
    chances[:arrived] = 1 / min(arrived, 1000)
    assert abs(chi_square_z(slots_drawn(buffer, state, seed, DRAWS), chances)) < 4


@pytest.mark.parametrize("view", [fbuf.views.Row(), fbuf.views.Transition(n_step=3, stack=4)])
@pytest.mark.parametrize("sampler", [fbuf.samplers.Uniform(), fbuf.samplers.Prioritized(stratified=False)])
def test_rows_left_after_the_oldest_were_retired(sampler, view):
    """Frames all distinct, twice as many as the table has room for."""
    rng = np.random.default_rng(9)
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(1, 4), blocks=256)
    buffer = fbuf.Buffer(500, storage=storage, view=view, sampler=sampler)
    made = rows(rng, (20,), 0.05) | {"obs": jnp.zeros((20, 4), jnp.uint8)}
    state = buffer.init(jax.tree.map(lambda x: x[0], made))
    for _ in range(40):
        new = rows(rng, (20,), 0.05) | {"obs": jnp.asarray(rng.integers(0, 256, (20, 4)), jnp.uint8)}
        state = buffer.extend(state, new)
    held = int(buffer.size(state))
    assert 100 < held < 256
    slots = np.asarray(buffer.last(state, held).index.slot)
    allowed = np.isin(np.arange(500), slots)
    if state.anchors is not None:
        assert not (drawable(state) & ~allowed).any()
        allowed = drawable(state)
    assert abs(chi_square_z(slots_drawn(buffer, state, 0, DRAWS), allowed / allowed.sum())) < 4


@pytest.mark.parametrize("seed", range(3))
def test_uniform_transitions_of_lanes_out_of_step(seed):
    buffer, state, open_slots = lanes_out_of_step(fbuf.samplers.Uniform())
    lanes = open_slots.reshape(-1, 3).sum(axis=0)
    assert 0 < lanes[0] < lanes[1] < lanes[2] < 301
    counts = slots_drawn(buffer, state, seed, DRAWS)
    assert abs(chi_square_z(counts, open_slots / open_slots.sum())) < 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stratified", [False, True])
def test_prioritized_transitions_of_lanes_out_of_step(seed, stratified):
    sampler = fbuf.samplers.Prioritized(alpha=0.7, stratified=stratified)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots).astype(np.int32)
    index = buffer.get(state, jnp.asarray(slots)).index
    errors = np.random.default_rng(6).exponential(size=len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index, jnp.asarray(errors))
    chances = np.zeros(buffer.capacity)
    chances[slots] = (errors.astype(np.float64) + 1e-6) ** 0.7
    chances /= chances.sum()
    z = chi_square_z(slots_drawn(buffer, state, seed, DRAWS), chances)
    assert z < 4
    assert stratified or z > -4


def test_strata_leave_counts_next_to_nothing_to_chance():
    """One draw from each of B equal shares: a leaf gets B P(i) of them, give or take those on its two edges."""
    buffer = fbuf.Buffer(capacity=300, sampler=fbuf.samplers.Prioritized(alpha=1.0, eps=0.0))
    chances = np.random.default_rng(0).uniform(0.1, 2.0, 300).astype(np.float32)
    state = buffer.init(jnp.float32(0))
    state = buffer.extend(state, jnp.zeros(300, jnp.float32), priority=jnp.asarray(chances))
    expected = chances.astype(np.float64) / chances.sum(dtype=np.float64) * 2**14
    assert np.abs(slots_drawn(buffer, state, 0, 2**14) - expected).max() < 2.1


@pytest.mark.parametrize(
    ("size", "place"),
    [(32, slice(0, 1)), (32, slice(0, 16)), (32, slice(31, 32)), (5, slice(0, 1)), (5, slice(2, 5)), (40, slice(0, 9))],
)
def test_a_part_of_a_batch_is_as_good_as_any_other(size, place):
    """Strata handed out in order give half a batch of old rows: so flashbax's mixer never drew half of each buffer."""
    buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Prioritized())
    state = buffer.extend(buffer.init(jnp.float32(0)), jnp.zeros(100, jnp.float32))
    batches = jax.vmap(lambda key: buffer.peek(state, key, size))(jax.random.split(jax.random.key(0), 20_000))
    counts = np.bincount(np.asarray(batches.index.slot)[:, place].reshape(-1), minlength=100)
    assert chi_square_z(counts, np.full(100, 0.01)) < 4


@pytest.mark.parametrize("transition", [False, True])
def test_priorities_all_zero_mean_uniform_over_what_can_be_drawn(transition):
    """More rows than one block of the search that this falls back to."""
    sampler = fbuf.samplers.Prioritized(eps=0.0, stratified=False)
    if transition:
        buffer, state, open_slots = lanes_out_of_step(sampler, length=3001)
    else:
        buffer = fbuf.Buffer(capacity=9003, sampler=sampler)
        state = buffer.extend(buffer.init(jnp.float32(0)), jnp.zeros(5000, jnp.float32))
        open_slots = np.arange(9003) < 5000
    slots = jnp.asarray(np.flatnonzero(open_slots), jnp.int32)
    zeros = jnp.zeros(slots.shape, jnp.float32)
    state = buffer.update_priority(state, buffer.get(state, slots).index, zeros)
    batch = buffer.peek(state, jax.random.key(0), 64)
    np.testing.assert_allclose(batch.probability, 1 / open_slots.sum(), rtol=1e-6)
    np.testing.assert_allclose(batch.weight, 1.0, rtol=1e-6)
    counts = slots_drawn(buffer, state, 1, DRAWS // 4)
    assert abs(chi_square_z(counts, open_slots / open_slots.sum())) < 4


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_a_million_draws_of_many_rows(sampler):
    capacity = 50_021
    parts = {
        "uniform": fbuf.samplers.Uniform(),
        "prioritized": fbuf.samplers.Prioritized(alpha=1.0, eps=0.0, stratified=False),
    }
    buffer = fbuf.Buffer(capacity=capacity, sampler=parts[sampler])
    state = buffer.init(jnp.float32(0))
    chances = np.full(capacity, 1.0)
    if sampler == "prioritized":
        chances = np.random.default_rng(0).uniform(0.5, 2.0, capacity).astype(np.float32)
    given = {"priority": jnp.asarray(chances, jnp.float32)} if sampler == "prioritized" else {}
    state = buffer.extend(state, jnp.zeros(capacity, jnp.float32), **given)
    chances = chances.astype(np.float64) / chances.sum(dtype=np.float64)
    for seed in range(3):
        assert abs(chi_square_z(slots_drawn(buffer, state, seed, MANY), chances)) < 4


def test_weights_make_a_prioritized_mean_the_plain_mean():
    """With beta = 1 and no normalisation, E[w f] over draws is the mean of f over what can be drawn."""
    sampler = fbuf.samplers.Prioritized(alpha=1.0, beta=1.0, normalize=None)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots)
    index = buffer.get(state, jnp.asarray(slots, jnp.int32)).index
    errors = np.random.default_rng(7).uniform(0.2, 3.0, len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index, jnp.asarray(errors))
    value = np.zeros(buffer.capacity)
    value[slots] = np.random.default_rng(8).normal(size=len(slots))
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), DRAWS))
    estimate = np.mean(batch.weight.astype(np.float64) * value[batch.index.slot])
    assert abs(estimate - value[slots].mean()) < 5 * 3 / np.sqrt(DRAWS)


@pytest.mark.parametrize("bound", [1, 2, 3, 1000, 2**24 + 1, 2**30 + 12345, 2**31 - 2**24])
def test_integers_below_a_bound(bound):
    """Range, mean and, where few, each value; beyond 2^24 a float32 uniform would skip values."""
    got = np.asarray(_population.below(jax.random.key(bound), (DRAWS,), jnp.int32(bound)))
    assert got.min() >= 0 and got.max() < bound
    assert abs(got.mean() / bound - (bound - 1) / (2 * bound)) < 5 / np.sqrt(12 * DRAWS)
    if 1 < bound <= 1000:
        counts = np.bincount(got, minlength=bound)
        assert abs(chi_square_z(counts, np.full(bound, 1 / bound))) < 4
    else:
        odd = np.mean(got % 2)
        assert bound == 1 or abs(odd - 0.5) < 5 / np.sqrt(4 * DRAWS)


def test_integers_below_zero_are_zero():
    got = _population.below(jax.random.key(0), (5,), jnp.int32(0))
    assert got.tolist() == [0] * 5


def test_every_lane_can_be_empty():
    """A lane without anchors is skipped by draws that count through the lanes."""
    buffer, state, _ = lanes_out_of_step(fbuf.samplers.Uniform())
    fresh = dataclasses.replace(buffer, view=fbuf.views.Row())
    example = jax.tree.map(lambda x: x[0, 0], rows(np.random.default_rng(0), (1, 3), 0.0))
    for lane in range(3):
        state = fresh.init(example)
        mask = jnp.zeros((6, 3), bool).at[:, lane].set(True)
        state = fresh.extend(state, rows(np.random.default_rng(0), (6, 3), 0.0), mask=mask)
        counts = slots_drawn(fresh, state, lane, 4096)
        assert set(np.flatnonzero(counts)) == {position * 3 + lane for position in range(6)}
