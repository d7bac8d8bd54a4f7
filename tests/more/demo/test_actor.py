"""`VectorAtari`: real games, rows that line up, ends that keep their frame, the same for a seed."""

import numpy as np
import pytest

from benchmarks import _atari
from fbuf.demo._atari import VectorAtari


def play(env, steps, seed=0):
    """The observations seen, what came of each step, and the true next observations."""
    rng = np.random.default_rng(seed)
    seen, results, finals = [env.reset()], [], []
    for _ in range(steps):
        obs, *result = env.step(rng.integers(0, env.num_actions, env.lanes, dtype=np.int32))
        seen.append(obs)
        results.append(result)
        finals.append(env.final_obs)
    return np.stack(seen), [np.stack(r) for r in zip(*results, strict=True)], np.stack(finals)


def test_shapes_and_dtypes():
    env = VectorAtari("Pong", 3, seed=0)
    assert env.game == "pong" and env.num_actions == 6
    seen, (reward, terminated, truncated), finals = play(env, 20)
    assert seen.shape == (21, 3, 84, 84) and seen.dtype == np.uint8
    assert finals.shape == (20, 3, 84, 84) and finals.dtype == np.uint8
    assert reward.shape == (20, 3) and reward.dtype == np.float32
    assert terminated.dtype == truncated.dtype == np.bool_
    # A picture, and one that moves.
    assert len(np.unique(seen)) > 4
    assert all((seen[t] != seen[t + 1]).any() for t in range(20))


def test_a_seed_gives_the_same_game_again():
    env = VectorAtari("Breakout", 2, seed=7)
    first, again = play(env, 150), play(env, 150)
    other = play(VectorAtari("Breakout", 2, seed=7, threads=1), 150)
    for one in (again, other):
        np.testing.assert_array_equal(first[0], one[0])
        np.testing.assert_array_equal(first[1], one[1])
        np.testing.assert_array_equal(first[2], one[2])
    assert (play(VectorAtari("Breakout", 2, seed=9), 150)[0] != first[0]).any()


def test_a_lane_is_the_game_of_its_own_seed():
    # Lanes end at different steps, some by losing and some at the limit.
    several = VectorAtari("Breakout", 3, seed=4, max_steps=160)
    alone = VectorAtari("Breakout", 1, seed=6, max_steps=160)
    a, b = several.reset(), alone.reset()
    rng, ends = np.random.default_rng(0), np.zeros((2, 3), int)
    for _ in range(800):
        np.testing.assert_array_equal(a[2], b[0])
        action = np.full(3, rng.integers(several.num_actions), np.int32)
        (a, *results), (b, *results_alone) = several.step(action), alone.step(action[:1])
        np.testing.assert_array_equal(several.final_obs[2], alone.final_obs[0])
        for result, result_alone in zip(results, results_alone, strict=True):
            assert result[2] == result_alone[0]
        ends += results[1:]
    assert (ends.sum(axis=1) > 0).all()


def test_results_are_not_overwritten_by_later_steps():
    env = VectorAtari("Pong", 2, seed=0)
    obs = env.reset()
    kept = [(obs, obs.copy())]
    for t in range(40):
        obs = env.step(np.full(2, t % 6, np.int32))[0]
        kept.append((obs, obs.copy()))
    for held, copy in kept:
        np.testing.assert_array_equal(held, copy)


def test_truncation_keeps_the_last_frame_and_starts_the_next_episode():
    limit = 12
    env = VectorAtari("Pong", 2, seed=0, max_steps=limit)
    seen, (_, terminated, truncated), finals = play(env, 3 * limit)
    assert not terminated.any()
    ends = np.flatnonzero(truncated[:, 0])
    np.testing.assert_array_equal(ends, [limit - 1, 2 * limit - 1, 3 * limit - 1])
    np.testing.assert_array_equal(truncated[:, 0], truncated[:, 1])
    ended = truncated[:, :, None, None]
    # Between ends the true next observation is the one seen next; at an end it is another one.
    np.testing.assert_array_equal(np.where(ended, 0, finals), np.where(ended, 0, seen[1:]))
    assert all((finals[t, lane] != seen[t + 1, lane]).any() for t in ends for lane in (0, 1))
    # The last frame belongs to the episode that ended: a longer episode shows it at the same step.
    longer, _, _ = play(VectorAtari("Pong", 2, seed=0, max_steps=10 * limit), limit)
    np.testing.assert_array_equal(finals[limit - 1], longer[limit])


def test_a_lost_game_terminates_and_does_not_truncate():
    env = VectorAtari("Breakout", 4, seed=0)
    seen, (reward, terminated, truncated), finals = play(env, 500)
    assert terminated.any() and not truncated.any()
    assert reward.sum() > 0
    t, lane = np.argwhere(terminated)[0]
    assert (finals[t, lane] != seen[t + 1, lane]).any()


def test_invalid_arguments_are_refused():
    env = VectorAtari("Pong", 2, seed=0)
    cases = [
        (lambda: VectorAtari("Brekout", 1, 0), ValueError, r"'Brekout' is none of .* Try breakout"),
        (lambda: VectorAtari("Pong", 0, 0), ValueError, r"lanes is 0; expected >= 1"),
        (lambda: VectorAtari("Pong", 1, 0, max_steps=0), ValueError, r"max_steps is 0"),
        (lambda: VectorAtari("Pong", 1, -1), ValueError, r"seed is -1"),
        (lambda: env.step([0]), RuntimeError, r"obs = env\.reset\(\) first"),
        (lambda: env.reset() is not None and env.step(np.zeros(3, np.int32)), ValueError, r"int32\[3\]; .* int32\[2\]"),
        (lambda: env.step(np.zeros(2, np.float32)), ValueError, r"actions is float32\[2\]"),
        (lambda: env.step(np.array([0, 6], np.int32)), ValueError, r"lie in \[0, 6\]; expected \[0, 5\]"),
        (lambda: env.step(np.array([-1, 0], np.int32)), ValueError, r"lie in \[-1, 0\]"),
    ]
    for call, error, message in cases:
        pytest.raises(error, call).match(message)
    assert all(VectorAtari(name, 1, seed=0).game == "ms_pacman" for name in ("MsPacman", "ms_pacman"))


def test_benchmark_frames_are_the_run_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(_atari.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(_atari, "BLOCK", 60)
    made, starts = _atari.frames("Breakout", 400)
    assert made.shape == (400, 84, 84) and starts[0] and 1 < starts.sum() < 20
    played = [pair for pair, _ in zip(_atari.play("Breakout", 0), range(400), strict=False)]
    np.testing.assert_array_equal(made, np.stack([frame for frame, _ in played]))
    np.testing.assert_array_equal(starts, [start for _, start in played])
    # From the cache, shorter and longer: the same run.
    blocks = sorted(tmp_path.rglob("*.zst"))
    assert len(blocks) == 7
    blocks[1].unlink()
    longer, _ = _atari.frames("Breakout", 421)
    np.testing.assert_array_equal(longer[:400], made)
    monkeypatch.setattr(_atari, "play", None)  # all is there: nothing is played
    np.testing.assert_array_equal(_atari.frames("Breakout", 130)[0], made[:130])
    assert [len(block) for block, _ in _atari.blocks("Breakout", 130)] == [60, 60, 10]
