"""More of `samplers.Consume`: other views and lanes, many rows, many states at once, in place."""

from __future__ import annotations

from typing import Any

import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Row, Sequence, Transition
from tests.samplers.test_consume import Trial, check_places


@pytest.mark.parametrize(
    ("sampler", "view", "lanes", "donated"),
    [
        (Consume(), Row(), None, True),
        (Consume(3), Transition(n_step=2), 2, True),
        (Consume(), Transition(n_step=2, stack=3), None, False),
        (Consume(), Sequence(3, boundary="mask"), 3, True),
    ],
)
def test_no_row_is_drawn_too_often(sampler: Any, view: Any, lanes: int | None, donated: bool) -> None:
    buffer = fbuf.Buffer(11 * (lanes or 1), sampler=sampler, view=view, lanes=lanes)
    Trial(buffer, 0, donated).run(40)


def test_every_row_is_as_likely_as_every_other() -> None:
    check_places(3000)
