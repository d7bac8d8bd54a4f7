"""More samplers, views and batch sizes in chi-square tests."""

from __future__ import annotations

from fbuf.samplers import Prioritized
from fbuf.views import Transition
from tests.support.uniformity import (
    check_prioritized,
    check_zero_priorities,
)

PRIORITIZED = Prioritized(stratified=False)
STEPS = Transition(n_step=3, stack=4)


def test_priorities_all_zero_mean_uniform_over_what_can_be_drawn():
    check_zero_priorities(transition=True)


def test_stratified_transitions_of_lanes_out_of_step():
    check_prioritized(stratified=True)
