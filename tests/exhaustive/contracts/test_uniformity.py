"""Draws from retired rows, with every sampler."""

import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from fbuf.views import Row, Transition
from tests.support.uniformity import check_parts, check_retired, check_zero_priorities, chi_square_z, slots_drawn


@pytest.mark.parametrize("view", [Row(), Transition(n_step=3, stack=4, autoreset="same_step")], ids=repr)
@pytest.mark.parametrize(
    "sampler", [Uniform(), Prioritized(stratified=False), Consume(), Epoch(), Staleness(500)], ids=repr
)
def test_rows_left_after_the_oldest_were_retired(sampler, view):
    check_retired(sampler, view)


def test_a_part_of_a_batch_is_as_good_as_any_other():
    check_parts(5, slice(0, 1), slice(2, 5))
    check_parts(40, slice(0, 9))


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(alpha=1.0, eps=0.0, stratified=False)])
def test_a_million_draws_of_many_rows(sampler):
    capacity, chances = 50_021, np.ones(50_021)
    buffer = fbuf.Buffer(capacity=capacity, sampler=sampler)
    given = {}
    if sampler.prioritized:
        given["priority"] = np.random.default_rng(0).uniform(0.5, 2.0, capacity).astype(np.float32)
        chances = given["priority"].astype(np.float64)
    state = buffer.extend(buffer.init(np.float32(0)), np.zeros(capacity, np.float32), **given)
    for seed in range(3):
        assert abs(chi_square_z(slots_drawn(buffer, state, seed, 2**20), chances / chances.sum())) < 4


def test_priorities_all_zero_mean_uniform_over_what_can_be_drawn():
    check_zero_priorities(transition=True)
