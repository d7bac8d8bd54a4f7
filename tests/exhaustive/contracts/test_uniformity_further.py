"""Further cases of uniformity, which take long: see `tests/more/contracts/test_uniformity.py`."""

from __future__ import annotations

import pytest

from fbuf.samplers import Consume
from fbuf.views import Row
from tests.more.contracts.test_uniformity import PRIORITIZED, STEPS  # noqa: F401
from tests.support.uniformity import (
    check_retired,
)


@pytest.mark.parametrize(
    ("sampler", "view"),
    [(PRIORITIZED, STEPS), (Consume(), Row())],
    ids=repr,
)
def test_rows_left_after_the_oldest_were_retired(sampler, view):
    check_retired(sampler, view)
