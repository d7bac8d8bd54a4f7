"""`VectorAtari`: real games, rows that line up, ends that keep their frame, the same for a seed."""

import numpy as np
import pytest

from fbuf.demo._atari import VectorAtari

pytestmark = pytest.mark.more


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


def test_a_lane_is_the_game_of_its_own_seed_again_after_a_reset():
    several = VectorAtari("Breakout", 3, seed=4, max_steps=160)
    alone = VectorAtari("Breakout", 1, seed=6, max_steps=160, threads=1)
    play(alone, 150)
    a, b = several.reset(), alone.reset()
    rng, ends, differs = np.random.default_rng(0), np.zeros((2, 3), int), False
    for _ in range(800):
        np.testing.assert_array_equal(a[2], b[0])
        action = np.full(3, rng.integers(several.num_actions), np.int32)
        (a, *results), (b, *results_alone) = several.step(action), alone.step(action[:1])
        np.testing.assert_array_equal(several.final_obs[2], alone.final_obs[0])
        assert [result[2] for result in results] == [result[0] for result in results_alone]
        ends += results[1:]  # of different steps: lost, or at the limit
        differs |= (a[0] != a[1]).any()
    assert differs and (ends.sum(axis=1) > 0).all()


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


def test_invalid_arguments_are_refused():
    env = VectorAtari("Pong", 2, seed=0)
    cases = [
        (lambda: VectorAtari("Brekout", 1, 0), ValueError, r"'Brekout' is none of .* Try breakout"),
        (lambda: env.step([0]), RuntimeError, r"obs = env\.reset\(\) first"),
        (lambda: env.reset() is not None and env.step(np.zeros(3, np.int32)), ValueError, r"int32\[3\]; .* int32\[2\]"),
        (lambda: env.step(np.array([0, 6], np.int32)), ValueError, r"lie in \[0, 6\]; expected \[0, 5\]"),
    ]
    for call, error, message in cases:
        pytest.raises(error, call).match(message)
    assert all(VectorAtari(name, 1, seed=0).game == "ms_pacman" for name in ("MsPacman", "ms_pacman"))
