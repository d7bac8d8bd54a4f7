"""Checkpoints that the first release of each version of the format wrote are loaded, and go on."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import fbuf
from tests.golden import buffers as make
from tests.support.checkpoint import same

FOLDER = Path(__file__).parent / "golden" / "buffers-v1"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("device", "compressed") else pytest.mark.slow) for n in make.BUFFERS],
)
def test_version_1(name: str) -> None:
    buffer, state, extra = fbuf.load(FOLDER / name, extra=True)
    assert buffer == make.BUFFERS[name]
    assert extra["step"] == 7 and int(jax.random.bits(extra["key"])) == int(jax.random.bits(jax.random.key(3)))
    held = buffer.rows(state)
    assert np.asarray(held.mask).all()
    want = make.rows(make.STEPS - 8, 8)
    same({n: held.data[n] for n in want}, want)
    for i in range(3):
        state, batch = buffer.sample(state, jax.random.key(i), 4)
        assert np.asarray(batch.mask).any()
    state = buffer.extend(state, make.rows(make.STEPS, 3))
    same(buffer.last(state, 8).data["obs"], make.rows(make.STEPS - 5, 8)["obs"])


def test_version_1_of_a_replay() -> None:
    replay = fbuf.Replay.load(FOLDER / "replay")
    assert len(replay) == 16 and replay.sample(4).mask.all()
    same(replay.last(8).data["obs"], make.rows(make.STEPS - 8, 8)["obs"])
    _, key = jax.random.split(jax.random.key(5))  # its seed
    again = fbuf.Replay.load(FOLDER / "replay")
    same(again.sample(4).data, replay.buffer.peek(again.state, key, 4).data)


def test_they_are_small_and_all_there() -> None:
    folders = {path.name for path in FOLDER.iterdir()}
    assert folders == {*make.BUFFERS, "replay"}
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 300_000
