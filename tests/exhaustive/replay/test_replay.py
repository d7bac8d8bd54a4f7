"""`Replay` between threads for minutes: no row is lost, doubled or torn, and memory stays constant."""

from __future__ import annotations

import pytest

from fbuf.storages import Compressed
from tests.support.replay import BUFFERS, at_exit, same_batches_as_the_buffer, soak


@pytest.mark.parametrize("name", BUFFERS)
def test_actors_and_learners_share_a_replay_for_long(name: str) -> None:
    soak(name, batches=4000)


@pytest.mark.parametrize("how", ["room", "error"])
def test_the_interpreter_exits(how: str) -> None:
    at_exit(how)


def test_batches_are_those_of_the_buffer() -> None:
    same_batches_as_the_buffer(Compressed(keys=("obs",)))
