"""The benchmarks count and compare what they say. CI runs all of them, at small sizes; no time is judged here."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from benchmarks import bench_compression, bench_deduplicated, bench_dispatch, bench_epoch, bench_sample
from benchmarks._harness import Absent
from tests.support.benchmarks import deduplicated, made_up, noise, written

ABSENT = Absent("peer", "left out by the test")


def test_sample_notices_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_sample.bare
    monkeypatch.setattr(bench_sample, "bare", lambda a, b, slots: real(a, b, [(s + 1) % a.shape[0] for s in slots]))
    with pytest.raises(AssertionError, match="reads other rows"):
        bench_sample.measure(bench_sample.ROW, capacity=500, batch_size=8, rounds=2)


def test_stacks_stop_at_episodes() -> None:
    frames, starts = made_up(60)
    run = bench_compression.run_of(frames, starts)
    obs, next_obs = run.pairs(np.arange(60))
    for t in range(60):
        episode = max(s for s in np.flatnonzero(starts) if s <= t)
        for back in range(4):
            want = frames[t - back] if t - back >= episode else np.zeros((84, 84), np.uint8)
            assert np.array_equal(obs[t, 3 - back], want)
        last = t == 59 or starts[t + 1]
        assert run.end[t] == last
        assert np.array_equal(next_obs[t], obs[t] if last else obs[t + 1])


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic frames in place of games."""

    def frames(game: str, count: int, seed: int = 0) -> Any:
        return made_up(count, seed=len(game))

    games = types.SimpleNamespace(frames=frames, GAMES=("Pong", "Qbert"))
    monkeypatch.setattr(bench_compression, "_atari", games)
    monkeypatch.setattr(bench_deduplicated, "_atari", games)


@pytest.mark.usefixtures("played")
def test_compression_notices_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench_compression.Run.pairs
    monkeypatch.setattr(bench_compression.Run, "pairs", lambda run, at: real(run, (at + 1) % len(run.frames)))
    with pytest.raises(AssertionError, match="ours gives other stacks"):
        bench_compression.compare(("Pong",), 900, 2, ABSENT, judged=False)


def distinct(frames: np.ndarray, block: tuple[int, int]) -> int:
    """Blocks that differ, counted without the library."""
    h, w = block
    padded = np.pad(frames, ((0, 0), (0, -84 % h), (0, -84 % w)))
    tiles = padded.reshape(len(frames), padded.shape[1] // h, h, padded.shape[2] // w, w).swapaxes(2, 3)
    return len({tile.tobytes() for tile in tiles.reshape(-1, h, w)})


@pytest.mark.parametrize(
    ("on_full", "message"), [("refuse", r"[1-9]\d* rows refused"), ("retire", r"[1-9]\d* retired")]
)
def test_deduplicated_notices_lost_rows(on_full: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        written(deduplicated(blocks=1024, on_full=on_full), noise(64), crowded=2)


def test_programs_are_counted() -> None:
    if (unable := bench_dispatch.can_count()) is not None:
        pytest.skip(unable.reason)
    one, x = jax.jit(lambda x: x * jnp.float32(2)), jnp.zeros(3, jnp.float32)
    assert bench_dispatch.programs(lambda: x) == 0
    assert bench_dispatch.programs(lambda: one(one(x))) == 2
    assert bench_dispatch.programs(lambda: (x + x, x.reshape(1, 3))) == 2


@pytest.mark.parametrize("kind", ["Device, Prioritized/Transition"])
def test_sample_and_update_priority_move_no_rows(kind: str) -> None:
    buffer, state = bench_dispatch.filled(256, **bench_dispatch.KINDS[kind])
    assert set(bench_dispatch.moved(buffer, state).values()) == {0}


def test_copies_need_a_control_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fbuf.Buffer, "extend", lambda self, state, rows: state)
    with pytest.raises(AssertionError, match="the pointers prove nothing"):
        bench_dispatch.find_copies(256)


def test_epoch_notices_rows_drawn_twice() -> None:
    with pytest.raises(AssertionError, match="not every slot once"):
        bench_epoch.check(np.array([0, 1, 1, 3]), 4)
