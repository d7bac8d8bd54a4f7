"""Draws of `Prioritized` and `Ranked` from larger buffers, and what torchrl gives; see `tests/samplers/test_prioritized.py`."""

import jax
import numpy as np
import pytest

from fbuf.samplers import Prioritized, Ranked
from tests.support.priorities import KEY, filled, index_of
from tests.support.tables import one_of
from tests.support.uniformity import chi_square_z, lanes_out_of_step

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
    buffer, state = filled(Prioritized(1.0, 1.0, 0.0, normalize=normalize, replace=False), priority)
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


def test_a_changed_alpha_of_ranks_applies_at_once():
    buffer, state = filled(Ranked(normalize="buffer"), [4.0, 2.0, 1.0])
    for alpha in (0.0, 1.0, 2.0):
        batch = jax.device_get(buffer.peek(buffer.set(state, alpha=alpha), KEY, 64, beta=1.0))
        chances = np.array([1, 2, 3.0]) ** -alpha
        np.testing.assert_allclose(batch.probability, (chances / chances.sum())[batch.data], rtol=1e-6)
        np.testing.assert_allclose(batch.weight, (chances.min() / chances)[batch.data], rtol=1e-5)
