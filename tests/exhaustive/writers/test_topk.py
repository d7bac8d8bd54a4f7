"""`writers.TopK`: ranks of every kind, further capacities, and steps in place."""

import pytest
from hypothesis import given

from tests.support.tables import checks
from tests.writers.test_topk import KINDS, PROGRAM, check_capacity, check_inplace, check_program, check_ways


@pytest.mark.parametrize("kind", KINDS)
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    check_program(kind, program)


test_checks = checks((check_capacity, [8, 9]), (check_ways, [(600, 40)]))


test_optimized_checks = pytest.mark.optimized(checks((check_inplace, ["jit", "vmap"])))
