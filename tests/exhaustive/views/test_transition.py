"""Every layout and size of `Transition` against a plain accumulator."""

import pytest

from tests.views.test_transition import CASES, LAYOUTS, check_accumulated


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)
