"""Rows of windows, priorities and ring facts after any sequence of methods: see `tests/support/model_windows.py`."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.model_cases import EXAMPLES, STEPS, cases, make
from tests.support.model_windows import WindowTrial

PROGRAMS = st.lists(
    st.tuples(st.sampled_from((*STEPS, *("update_windows",) * 6)), st.integers(0, 2**16)), min_size=1, max_size=12
)
CASES = [
    ("sequence", "batch", "device", 3),
    ("sequence, stride", "held", "compressed", None),
    ("mask, both", "batch, host", "compressed", 3),
    ("episode, cut", "ranks, all", "device", 3),
    ("cross, dilation", "none", "device", None),
]

case = cases(CASES)


@settings(max_examples=EXAMPLES)
@given(program=PROGRAMS)
def test_rows_of_windows_are_those_of_the_model(case: Any, program: Any) -> None:
    view, sampler, storage, lanes = case
    WindowTrial(make(view, sampler, storage, lanes)).run(program, given=len(view) % 2 == 0)
