"""Double DQN learns to catch: see `tests/demo/test_catch.py`."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import fbuf
from fbuf.demo import catch

SHORT = catch.Config(iterations=120, points=4)


def test_the_network_learns_from_the_stacks_it_acted_on() -> None:
    buffer = fbuf.Buffer(64, view=fbuf.views.Transition(stack=catch.STACK), lanes=2)
    replay, actors, seen = buffer.init(catch.EXAMPLE), catch.first_actors(jax.random.key(0), 2), []
    play, add = jax.jit(catch.play), jax.jit(buffer.add)
    for number in range(20):
        seen.append(np.asarray(actors.stacks))
        actors, rows = play(actors, np.full(2, number % 3, np.int32), jax.random.key(number))
        replay = add(replay, rows)
    batch = jax.device_get(buffer.peek(replay, jax.random.key(1), 64))
    for slot, stack in zip(batch.index.slot, batch.data["obs"], strict=True):
        np.testing.assert_array_equal(stack, seen[slot // 2][slot % 2])


def test_the_command_trains_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch, "Config", lambda: SHORT)
    assert catch.main(["--storage", "compressed", "--out", str(tmp_path / "curve.png")]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "jax, compressed" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
