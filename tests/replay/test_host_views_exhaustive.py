"""Every view that `Replay` draws in NumPy, with and without lanes."""

import pytest

from tests.support.host_views import VIEWS, compare

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("lanes", [None, 1, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_batches_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes, seed=2) > 60
