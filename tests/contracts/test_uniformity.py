"""Chi-square tests of who gets drawn: every anchor as often as its probability says, at fixed seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import random
from fbuf.samplers import Uniform
from tests.support import uniformity
from tests.support.tables import checks


def test_uniform_rows():
    buffer = fbuf.Buffer(capacity=1000)
    for arrived in (700, 2500):
        state = buffer.extend(buffer.init(jnp.float32(0)), np.zeros(arrived, np.float32))
        chances = np.zeros(1000)
        chances[:arrived] = 1 / min(arrived, 1000)
        for seed in range(3):
            counts = uniformity.slots_drawn(buffer, state, seed, uniformity.DRAWS)
            assert abs(uniformity.chi_square_z(counts, chances)) < 4


@pytest.mark.more
def test_uniform_transitions_of_lanes_out_of_step():
    buffer, state, open_slots = uniformity.lanes_out_of_step(Uniform())
    lanes = open_slots.reshape(-1, 3).sum(axis=0)
    assert 0 < lanes[0] < lanes[1] < lanes[2] < 301
    for seed in range(3):
        counts = uniformity.slots_drawn(buffer, state, seed, uniformity.DRAWS)
        assert abs(uniformity.chi_square_z(counts, open_slots / open_slots.sum())) < 4


test_chances = checks(
    # Strata handed out in order give half a batch of old rows: so flashbax's mixer never drew half of each buffer.
    (uniformity.check_parts, [(32, slice(0, 1), slice(0, 16), slice(31, 32))]),
    (uniformity.check_zero_priorities, [False]),
    more=[(uniformity.check_prioritized, [False, True])],  # stratified or not
    exhaustive=[
        (uniformity.check_parts, [(5, slice(0, 1), slice(2, 5)), (40, slice(0, 9))]),
        (uniformity.check_zero_priorities, [True]),  # of transitions
    ],
)


def test_integers_below_a_bound():
    below = jax.jit(random.randint_below, static_argnums=1)
    for bound in (1, 2, 3, 1000, 2**24 + 1, 3 * 2**29, 2**30 + 12345, 2**31 - 2**24):
        got = np.asarray(below(jax.random.key(bound), (uniformity.DRAWS,), np.int32(bound)))
        assert got.min() >= 0 and got.max() < bound
        bits = random.pairs(jax.random.key(bound), uniformity.DRAWS, random.BELOW)
        first, second = (np.asarray(half).astype(np.uint64) for half in bits)
        np.testing.assert_array_equal(got, first * bound + (second * bound >> 32) >> 32)
        assert abs(got.mean() / bound - (bound - 1) / (2 * bound)) < 5 / np.sqrt(12 * uniformity.DRAWS)
        if 1 < bound <= 1000:
            counts = np.bincount(got, minlength=bound)
            assert abs(uniformity.chi_square_z(counts, np.full(bound, 1 / bound))) < 4
        else:
            odd = np.mean(got % 2)
            assert bound == 1 or abs(odd - 0.5) < 5 / np.sqrt(4 * uniformity.DRAWS)
    assert not np.asarray(below(jax.random.key(0), (uniformity.DRAWS,), np.int32(0))).any()


@pytest.mark.more
def test_every_lane_can_be_empty():
    buffer = fbuf.Buffer(18, lanes=3)
    example = jax.tree.map(lambda x: x[0, 0], uniformity.rows(np.random.default_rng(0), (1, 3), 0.0))
    for lane in range(3):
        mask = np.arange(3) == lane
        given = uniformity.rows(np.random.default_rng(0), (6, 3), 0.0)
        state = buffer.extend(buffer.init(example), given, mask=np.tile(mask, (6, 1)))
        counts = uniformity.slots_drawn(buffer, state, lane, 4096)
        assert set(np.flatnonzero(counts)) == {position * 3 + lane for position in range(6)}
