"""Grouped rows with every view and sampler that is `row_by_row`, and with one that is not."""

import itertools

import pytest

from tests.support.combinations import SAMPLERS
from tests.support.grouping import VIEWS, collected, equal

pytestmark = pytest.mark.exhaustive

CASES = [case for case in itertools.product(SAMPLERS, VIEWS, (None, 3)) if collected(*case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_state_does_not_depend_on_how_rows_are_grouped(case):
    assert equal(*case)


def test_the_pool_over_windows_does():
    assert not equal("Consume", "Sequence(4)", None)
