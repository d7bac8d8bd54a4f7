"""Every view that `Replay` draws in NumPy, with and without lanes, uniformly and by priority."""

import pytest

from tests.support.host_views import SAMPLERS, VIEWS, compare

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("lanes", [None, 1, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_batches_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes, seed=2) > 60


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_prioritized_batches_and_states_are_those_of_the_programs(view, lanes, sampler):
    assert compare(VIEWS[view], lanes, seed=3, sampler=SAMPLERS[sampler]) > 60
