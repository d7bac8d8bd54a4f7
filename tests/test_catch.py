"""The game of `fbuf.demo.catch`, and that Double DQN learns it: alike whichever storage holds the frames, and in torch."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.demo import catch

SHORT = catch.Config(iterations=120, points=4)


def played(ball: int, drift: int, paddle: int, actions: list[int]) -> tuple[list[tuple[int, int, int]], float]:
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


def test_a_game_is_what_its_rules_say() -> None:
    random = np.random.default_rng(0)
    step = jax.jit(catch.step)
    for _ in range(20):
        ball, paddle = (int(n) for n in random.integers(0, catch.SIZE, 2))
        drift, actions = int(random.integers(-1, 2)), random.integers(0, 3, catch.SIZE - 1).tolist()
        seen, reward = played(ball, drift, paddle, actions)
        game = catch.Game(*(jnp.int32(n) for n in (0, ball, drift, paddle)))
        for number, (action, there) in enumerate(zip(actions, seen, strict=True)):
            game, got, down = step(game, jnp.int32(action), jax.random.key(number))
            if number < catch.SIZE - 2:
                assert (int(game.row), int(game.column), int(game.paddle)) == there
                assert float(got) == 0 and not bool(down)
                frame = np.array(catch.draw(game))
                assert frame.dtype == np.uint8 and frame.sum() == 255 * 2
                assert frame[there[0], there[1]] == frame[-1, there[2]] == 255
        assert float(got) == reward and bool(down) and int(game.row) == 0  # and the next one begins


def test_rows_and_stacks_are_of_one_episode() -> None:
    actors = catch.first_actors(jax.random.key(0), 4)
    play = jax.jit(catch.play)
    for number in range(2 * catch.SIZE):
        before = actors.stacks
        actors, rows = play(actors, jnp.full(4, number % 3, jnp.int32), jax.random.key(number))
        np.testing.assert_array_equal(rows["obs"], before[:, -1])
        fresh = np.asarray(rows["terminated"])
        after = np.asarray(actors.stacks)
        assert (after[fresh, 0] == 0).all()
        np.testing.assert_array_equal(after[~fresh, 0], np.asarray(before)[~fresh, 1])
        np.testing.assert_array_equal(after[:, 1], jax.vmap(catch.draw)(actors.games))


def test_the_stacks_that_are_learned_from_are_those_that_were_acted_on() -> None:
    buffer = fbuf.Buffer(64, view=fbuf.views.Transition(stack=catch.STACK), lanes=2)
    replay, actors, seen = buffer.init(catch.EXAMPLE), catch.first_actors(jax.random.key(0), 2), []
    for number in range(20):
        seen.append(np.asarray(actors.stacks))
        actors, rows = catch.play(actors, jnp.full(2, number % 3, jnp.int32), jax.random.key(number))
        replay = buffer.add(replay, rows)
    batch = buffer.peek(replay, jax.random.key(1), 64)
    for slot, stack in zip(np.asarray(batch.index.slot), np.asarray(batch.data["obs"]), strict=True):
        np.testing.assert_array_equal(stack, seen[slot // 2][slot % 2])


SLOW = ("host",)


@pytest.mark.parametrize(
    "storage", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in catch.STORAGES if n != "device"]
)
def test_training_is_the_same_bit_for_bit_whichever_storage(storage: str) -> None:
    one, other = (
        catch.train(catch.make_buffer(catch.STORAGES[name](), SHORT, 512), 3, SHORT) for name in ("device", storage)
    )
    np.testing.assert_array_equal(one.curve, other.curve)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(one.curve) == 4 and -1 <= one.final <= 1


def test_a_torch_learner_is_fed_as_well() -> None:
    result = catch.train_torch(catch.make_buffer(config=SHORT, capacity=512), 0, SHORT)
    assert result.curve.shape == (4,) and np.isfinite(result.curve).all()
    assert result.stats["size"] == 512 and result.stats["refused_nonfinite"] == 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch, "Config", lambda: catch_config)
    catch_config = SHORT
    assert catch.main(["--storage", "compressed", "--out", str(tmp_path / "curve.png")]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "jax, compressed" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("learner", [catch.train, catch.train_torch], ids=["jax", "torch"])
def test_it_learns_to_catch(learner) -> None:
    result = learner(catch.make_buffer())
    assert result.curve[0] < -0.5 and result.curve[-1] > 0.6  # play explores to the end, a step in twenty at random
    assert result.final > 0.9
