"""`fbuf.gymnasium`: rows of vector environments, in each autoreset mode."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gymnasium")
import fbuf
from tests.support.lander import GAMMA, MODES, Lander, by_hand, drawn, play, vectorise


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_draws_are_the_transitions_of_environments_stepped_by_hand(mode) -> None:
    envs = vectorise(Lander, 3, mode, copy=False)
    view = fbuf.gymnasium.view(envs, gamma=GAMMA)
    example = fbuf.gymnasium.spec(envs)
    replay = fbuf.Replay(fbuf.Buffer(300, view=view, sampler=fbuf.samplers.Epoch(), lanes=3), example)
    counts = play(fbuf.gymnasium.Recorder(envs, replay), 60)
    assert drawn(replay, example) == by_hand(Lander, example, counts)
