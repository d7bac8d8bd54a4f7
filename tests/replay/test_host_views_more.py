"""Further views that `Replay` draws in NumPy."""

import pytest

from tests.support.host_views import VIEWS, compare

pytestmark = pytest.mark.more

CASES = [
    ("n, final", 1),
    ("stack, n, final", None),
    ("stop, bootstrap", 2),
    ("cross, learns", 1),
    ("mask, resets", 3),
    ("episode, cut", None),
]


@pytest.mark.optimized
@pytest.mark.parametrize(("view", "lanes"), CASES, ids=str)
def test_batches_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes, seed=1) > 60
