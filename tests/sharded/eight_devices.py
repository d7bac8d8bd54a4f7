"""Sharded buffers on eight devices. `test_sharded.py` runs these in a process of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.sharded import check_draws


@pytest.mark.parametrize("draw", ["local", "global"])
def test_rows_are_drawn_with_the_probabilities_of_one_buffer(draw: Any) -> None:
    check_draws("buffer", draw, 2**15, 2**12)
