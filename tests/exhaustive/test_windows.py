"""Every view of windows with every sampler is written, drawn and updated in place."""

from __future__ import annotations

from typing import Any

import pytest

from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Row, Sequence
from tests.support.windows import check_inplace

CASES = [
    (Sequence(8), Uniform("episodes")),
    (Sequence(8, stride=4), Prioritized()),
    (Sequence(6, boundary="mask", at=3), Prioritized(normalize="buffer")),
    (Sequence(8, boundary="cross", dilation=2), Uniform()),
    (Episode(12), Prioritized()),
    (Episode(12, longer="cut"), Uniform("episodes")),
    (Row(), Uniform("episodes")),
]


@pytest.mark.optimized
@pytest.mark.parametrize("first", ["extend", "sample"])
@pytest.mark.parametrize(("view", "sampler"), CASES, ids=repr)
def test_steps_are_in_place(view: Any, sampler: Any, first: str) -> None:
    check_inplace(view, sampler, first)
