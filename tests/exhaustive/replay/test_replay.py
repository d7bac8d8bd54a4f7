"""`Replay` between threads for minutes: no row is lost, doubled or torn, and memory stays constant."""

from __future__ import annotations

import pytest

from tests.support.replay import BUFFERS, soak


@pytest.mark.parametrize("name", BUFFERS)
def test_actors_and_learners_share_a_replay_for_long(name: str) -> None:
    soak(name, batches=4000)
