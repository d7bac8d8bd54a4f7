"""`Consume(order="fifo")`: windows in order of arrival, none lost, and new rows refused where there is no room."""

from __future__ import annotations

import pytest

from tests.support.fifo import Trial, buffer_of


@pytest.mark.parametrize("settings", [(7, 3, 1), (12, 2, 2, 3, 3)], ids=["rows", "trajectories"])
def test_programs(settings: tuple[int, ...]) -> None:
    buffer = buffer_of(*settings)
    for seed in range(2):
        Trial(buffer, seed).run(60)
