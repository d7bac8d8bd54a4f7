"""`writers.TopK`: ranks of every kind, further capacities, and steps in place."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.writers.test_topk import KINDS, PROGRAM, check_capacity, check_inplace, check_program, check_ways


@pytest.mark.parametrize("kind", KINDS)
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind: str, program: list[tuple[int, int, bool]]) -> None:
    check_program(kind, program)


@pytest.mark.parametrize("capacity", [8, 9])
def test_any_capacity(capacity: int) -> None:
    check_capacity(capacity)


def test_one_by_one_and_at_once_keep_the_same_rows() -> None:
    check_ways(600, 40)


@pytest.mark.optimized
@pytest.mark.parametrize("form", ["jit", "vmap"])
def test_a_step_copies_nothing(form: str) -> None:
    check_inplace(form)
