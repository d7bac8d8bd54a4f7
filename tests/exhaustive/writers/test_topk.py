"""`writers.TopK`: ranks of every kind, further capacities, and steps in place."""

import pytest
from hypothesis import given

from tests.writers.test_topk import KINDS, PROGRAM, check_capacity, check_inplace, check_program, check_ways


@pytest.mark.parametrize("kind", KINDS)
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    check_program(kind, program)


@pytest.mark.parametrize("capacity", [8, 9])
def test_any_capacity(capacity):
    check_capacity(capacity)


def test_one_by_one_and_at_once_keep_the_same_rows():
    check_ways(600, 40)


@pytest.mark.optimized
@pytest.mark.parametrize("form", ["jit", "vmap"])
def test_a_step_copies_nothing(form):
    check_inplace(form)
