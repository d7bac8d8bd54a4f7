"""One `extend` of several rows leaves the state of as many `add`s, bit for bit, where the parts say so."""

import itertools

import pytest

from tests.support.combinations import SAMPLERS
from tests.support.grouping import VIEWS, collected, equal
from tests.support.tables import one_of

CASES = [
    ("Uniform", "Transition(3)", 3, True),
    ("Uniform", "Sequence(4)", None, False),
]
RECOMMENDED = [
    *itertools.product(("Uniform", "Prioritized"), ("Transition()", "Transition(3)", "Sequence(4)"), (None, 3)),
    ("Uniform(over='episodes')", "Episode", 3),
    ("Epoch", "Transition(3)", 3),
    ("Staleness(version=...)", "Transition()", 3),
    ("Ranked", "Row", 3),
    ("Consume", "Row", 3),
]
case = one_of(
    *CASES,
    more=[(*case, case[2] is not None) for case in RECOMMENDED],
    exhaustive=[case for case in itertools.product(SAMPLERS, VIEWS, (None, 3)) if collected(*case)],
)


def test_a_state_does_not_depend_on_how_rows_are_grouped(case):
    assert equal(*case)


@pytest.mark.exhaustive
def test_the_pool_over_windows_does():
    assert not equal("Consume", "Sequence(4)", None)
