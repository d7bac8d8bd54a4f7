"""`writers.TopK` with ranks of every dtype."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.support.topk import KINDS, check_program
from tests.test_topk import PROGRAM


@pytest.mark.parametrize("kind", KINDS)
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind: str, program: list[tuple[int, int, bool]]) -> None:
    check_program(kind, program)
