"""More layouts and sizes of `Transition` against a plain accumulator."""

import pytest

from tests.views.test_transition import CASES, LAYOUTS, QUICK, check_accumulated

REST = [(layout, case) for layout in LAYOUTS for case in CASES if (layout, case) not in QUICK]


@pytest.mark.parametrize(("layout", "case"), REST[::3])
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)
