"""One `extend` of several rows leaves the state of as many `add`s, bit for bit, where the parts say so."""

import pytest

from tests.support.grouping import equal

CASES = [
    ("Uniform", "Transition(3)", 3, True),
    ("Uniform", "Sequence(4)", None, False),
    ("Prioritized", "Transition()", 3, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_does_not_depend_on_how_rows_are_grouped(case):
    assert equal(*case)
