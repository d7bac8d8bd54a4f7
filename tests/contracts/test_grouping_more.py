"""Grouped rows with the views and samplers that are recommended, with and without lanes."""

import itertools

import pytest

from tests.support.grouping import equal

pytestmark = pytest.mark.more

CASES = [
    *itertools.product(("Uniform", "Prioritized"), ("Transition()", "Transition(3)", "Sequence(4)"), (None, 3)),
    ("Uniform(over='episodes')", "Episode", 3),
    ("Epoch", "Transition(3)", 3),
    ("Staleness(version=...)", "Transition()", 3),
    ("Ranked", "Row", 3),
    ("Consume", "Row", 3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_does_not_depend_on_how_rows_are_grouped(case):
    assert equal(*case, masked=case[2] is not None)
