"""More samplers, views and batch sizes in chi-square tests."""

from __future__ import annotations

import pytest

from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from fbuf.views import Row, Transition
from tests.support.uniformity import check_many, check_parts, check_prioritized, check_retired, check_zero_priorities

PRIORITIZED = Prioritized(stratified=False)
STEPS = Transition(n_step=3, stack=4)


@pytest.mark.parametrize("view", [Row(), STEPS])
@pytest.mark.parametrize("sampler", [Uniform(), PRIORITIZED, Consume(), Epoch(), Staleness(500)], ids=repr)
def test_rows_left_after_the_oldest_were_retired(sampler, view):
    check_retired(sampler, view)


def test_a_part_of_a_batch_is_as_good_as_any_other():
    check_parts(5, slice(0, 1), slice(2, 5))
    check_parts(40, slice(0, 9))


def test_priorities_all_zero_mean_uniform_over_what_can_be_drawn():
    check_zero_priorities(transition=True)


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(alpha=1.0, eps=0.0, stratified=False)])
def test_a_million_draws_of_many_rows(sampler):
    check_many(sampler)


def test_stratified_transitions_of_lanes_out_of_step():
    check_prioritized(stratified=True)
