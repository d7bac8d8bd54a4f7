"""Hindsight over every view, with every strategy, in one lane and in three."""

from __future__ import annotations

import pytest

from tests.test_hindsight import VIEWS, follow


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("view", VIEWS)
def test_goals_are_of_the_same_episode(view: str, strategy: str, lanes: int | None) -> None:
    for seed in range(1, 3):
        follow(view, strategy, lanes, seed)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_always_and_never(fraction: float) -> None:
    follow("one step", "future", None, 0, fraction=fraction)
