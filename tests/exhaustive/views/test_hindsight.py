"""Hindsight over every view, with every strategy, in one lane and in three."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fbuf
from fbuf.views import Hindsight, Transition
from tests.support.inplace import assert_draw_write_draw
from tests.views.test_hindsight import VIEWS, follow, observation, reward


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("view", VIEWS)
def test_goals_are_of_the_same_episode(view: str, strategy: str, lanes: int | None) -> None:
    for seed in range(1, 3):
        follow(view, strategy, lanes, seed)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_always_and_never(fraction: float) -> None:
    follow("one step", "future", None, 0, fraction=fraction)


@pytest.mark.optimized
@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs/frame",))])
def test_steps_are_in_place(storage: Any) -> None:
    view = Hindsight(Transition(n_step=2, stack=2, final_observation="last"), reward)
    buffer = fbuf.Buffer(200_000, lanes=2, view=view, storage=storage)
    number = np.zeros((), int)
    rows = {
        "obs": observation(number, number, 0.0),
        "last": observation(number, number, 0.0),
        "action": np.int32(0),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    }
    assert_draw_write_draw(buffer, rows, buffer.init(rows))
