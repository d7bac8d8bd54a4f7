"""Draws from retired rows, with every sampler."""

from __future__ import annotations

import pytest

from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from fbuf.views import Row, Transition
from tests.support.uniformity import check_retired


@pytest.mark.parametrize("view", [Row(), Transition(n_step=3, stack=4)], ids=repr)
@pytest.mark.parametrize(
    "sampler", [Uniform(), Prioritized(stratified=False), Consume(), Epoch(), Staleness(500)], ids=repr
)
def test_rows_left_after_the_oldest_were_retired(sampler, view):
    check_retired(sampler, view)
