"""More samplers, views and batch sizes in chi-square tests."""

from fbuf.samplers import Prioritized
from fbuf.views import Transition
from tests.support.uniformity import check_prioritized

PRIORITIZED = Prioritized(stratified=False)
STEPS = Transition(n_step=3, stack=4, autoreset="same_step")


def test_stratified_transitions_of_lanes_out_of_step():
    check_prioritized(stratified=True)
