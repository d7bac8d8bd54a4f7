"""Chi-square tests of who gets drawn."""

import functools

import jax
import numpy as np

import fbuf
from fbuf._indexing import anchors
from tests.support.trees import row_with

DRAWS = 2**18


def chi_square_z(counts, chances, groups=1):
    """The statistic as a standard normal number (Wilson and Hilferty 1931); `groups` are drawn as often as expected."""
    assert not counts[chances == 0].any()
    counts, chances = counts[chances > 0], chances[chances > 0]
    expected = chances / chances.sum() * counts.sum()
    freedom = len(counts) - groups
    statistic = np.sum((counts - expected) ** 2 / expected)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def slots_drawn(buffer, state, seed, draws):
    batch = buffer.peek(state, jax.random.key(seed), draws)
    assert bool(batch.mask.all())
    return np.bincount(np.asarray(batch.index.slot), minlength=buffer.capacity)


def rows(rng, shape, often):
    flags = {"terminated": rng.random(shape) < often, "truncated": rng.random(shape) < often}
    return row_with(np.zeros(shape, np.uint8), *shape, action=np.zeros(shape, np.int8), **flags)


@functools.cache
def lanes_out_of_step(sampler, length=301):
    """Fill a fifth of one lane, half of another, and a third several times; also return which slots can be drawn."""
    rng = np.random.default_rng(5)
    view = fbuf.views.Transition(n_step=3, stack=4, autoreset="same_step")
    buffer = fbuf.Buffer(capacity=3 * length, lanes=3, view=view, sampler=sampler)
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], rows(rng, (1, 3), 0.0)))
    for _ in range(8):
        mask = rng.random((100, 3)) < np.array([0.08, 0.2, 0.7])
        state = buffer.extend(state, rows(rng, (100, 3), 0.05), mask=mask)
    return buffer, state, drawable(state)


def drawable(state):
    return (np.asarray(state.anchors.flags) & anchors.ANCHOR) != 0


def check_zero_priorities(transition):
    """Draw where all priorities are zero, from more rows than one block of the search that this falls back to."""
    sampler = fbuf.samplers.Prioritized(eps=0.0, stratified=False)
    if transition:
        buffer, state, open_slots = lanes_out_of_step(sampler, length=3001)
    else:
        buffer = fbuf.Buffer(capacity=9003, sampler=sampler)
        state = buffer.extend(buffer.init(np.float32(0)), np.zeros(5000, np.float32))
        open_slots = np.arange(9003) < 5000
    slots = np.flatnonzero(open_slots).astype(np.int32)
    state = buffer.update_priority(state, buffer.get(state, slots).index, np.zeros(slots.shape, np.float32))
    batch = buffer.peek(state, jax.random.key(1), DRAWS // 4)
    np.testing.assert_allclose(batch.probability, 1 / open_slots.sum(), rtol=1e-6)
    np.testing.assert_allclose(batch.weight, 1.0, rtol=1e-6)
    counts = np.bincount(np.asarray(batch.index.slot), minlength=buffer.capacity)
    assert abs(chi_square_z(counts, open_slots / open_slots.sum())) < 4


def check_parts(size, *places):
    buffer = fbuf.Buffer(capacity=100, sampler=fbuf.samplers.Prioritized())
    state = buffer.extend(buffer.init(np.float32(0)), np.zeros(100, np.float32))
    peek = jax.jit(jax.vmap(lambda key: buffer.peek(state, key, size).index.slot))
    slots = np.asarray(peek(jax.random.split(jax.random.key(0), 20_000)))
    for place in places:
        counts = np.bincount(slots[:, place].reshape(-1), minlength=100)
        assert chi_square_z(counts, np.full(100, 0.01)) < 4


def check_prioritized(stratified):
    """With beta = 1 and no normalisation, E[w f] over draws is besides the mean of f over what can be drawn."""
    sampler = fbuf.samplers.Prioritized(alpha=0.7, beta=1.0, normalize=None, stratified=stratified)
    buffer, state, open_slots = lanes_out_of_step(sampler)
    slots = np.flatnonzero(open_slots).astype(np.int32)
    index = buffer.get(state, slots).index
    errors = np.random.default_rng(6).exponential(size=len(slots)).astype(np.float32)
    state = buffer.update_priority(state, index, errors)
    chances = np.zeros(buffer.capacity)
    chances[slots] = (errors.astype(np.float64) + 1e-6) ** 0.7
    chances /= chances.sum()
    value = np.zeros(buffer.capacity)
    value[slots] = np.random.default_rng(8).normal(size=len(slots))
    scale = np.sqrt(np.sum(value[slots] ** 2 / chances[slots])) / len(slots)  # of one draw's w f
    for seed in range(3):
        batch = jax.device_get(buffer.peek(state, jax.random.key(seed), DRAWS))
        z = chi_square_z(np.bincount(batch.index.slot, minlength=buffer.capacity), chances)
        assert z < 4
        assert stratified or z > -4
        estimate = np.mean(batch.weight.astype(np.float64) * value[batch.index.slot])
        assert abs(estimate - value[slots].mean()) < 5 * scale / np.sqrt(DRAWS)
