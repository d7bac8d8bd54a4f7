"""The demo's parts that need no games, its command line, and the game of `fbuf.demo.catch`."""

from unittest import mock

import jax
import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf.demo import _command, catch


def test_the_command_line(capsys):
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out
    pytest.raises(SystemExit, main, ["demo", "--storage", "disk"]).match("^2$")
    assert "compressed" in capsys.readouterr().err
    pytest.raises(SystemExit, main, ["--version"]).match("^0$")
    assert capsys.readouterr().out == f"fbuf {fbuf.__version__}\n"
    with mock.patch.object(_command, "main", side_effect=KeyboardInterrupt):
        assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def played(ball, drift, paddle, actions):
    """The oracle: (row, column, paddle) after each step until the ball is down, and the reward."""
    row, column = 0, ball
    seen = []
    for action in actions:
        paddle = min(max(paddle + action - 1, 0), catch.SIZE - 1)
        if not 0 <= column + drift < catch.SIZE:
            drift = -drift
        row, column = row + 1, column + drift
        seen.append((row, column, paddle))
    return seen, 1.0 if column == paddle else -1.0


def test_a_game_follows_its_rules():
    random, key = np.random.default_rng(0), jax.random.key(0)
    step, draw = jax.jit(catch.step), jax.jit(catch.draw)
    for _ in range(20):
        ball, paddle = (int(n) for n in random.integers(0, catch.SIZE, 2))
        drift, actions = int(random.integers(-1, 2)), random.integers(0, 3, catch.SIZE - 1).tolist()
        seen, reward = played(ball, drift, paddle, actions)
        game = catch.Game(*(np.int32(n) for n in (0, ball, drift, paddle)))
        for number, (action, there) in enumerate(zip(actions, seen, strict=True)):
            game, got, down = step(game, np.int32(action), key)
            if number < catch.SIZE - 2:
                assert (int(game.row), int(game.column), int(game.paddle)) == there
                assert float(got) == 0 and not bool(down)
                frame = np.array(draw(game))
                assert frame.dtype == np.uint8 and frame.sum() == 255 * 2
                assert frame[there[0], there[1]] == frame[-1, there[2]] == 255
        assert float(got) == reward and bool(down) and int(game.row) == 0  # and the next one begins


def test_rows_and_stacks_are_of_one_episode():
    key = jax.random.key(0)
    actors, play, draw = catch.first_actors(key, 4), jax.jit(catch.play), jax.jit(jax.vmap(catch.draw))
    for number in range(2 * catch.SIZE):
        before = np.asarray(actors.stacks)
        actors, rows = play(actors, np.full(4, number % 3, np.int32), key)
        np.testing.assert_array_equal(rows["obs"], before[:, -1])
        fresh = np.asarray(rows["terminated"])
        after = np.asarray(actors.stacks)
        assert (after[fresh, 0] == 0).all()
        np.testing.assert_array_equal(after[~fresh, 0], before[~fresh, 1])
        np.testing.assert_array_equal(after[:, 1], draw(actors.games))


def test_the_bar_says_compiling_until_the_first_step(capsys):
    pytest.importorskip("tqdm")
    with _command._progress("steps", 2) as show:
        assert "compiling" in capsys.readouterr().err
        show(2, {"loss": "1.0"})
    last = capsys.readouterr().err.split("\r")[-1]
    assert "loss=1.0" in last and "compiling" not in last


def test_the_bar_does_not_expect_steps_to_take_as_long_as_compiling(capsys, monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    now = [1000.0]
    monkeypatch.setattr(tqdm.std, "time", lambda: now[0])
    with _command._progress("steps", 4) as show:
        for step, now[0] in enumerate((1060.0, 1061.0, 1062.0), 1):
            show(step, {})
    assert "3/4 [00:02<" in capsys.readouterr().err
