"""The demo's parts that need no games, its command line, and the game of `fbuf.demo.catch`."""

import dataclasses
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.testing
from fbuf.__main__ import main
from fbuf.demo import _command, _compare_storages, _dqn, _report, _run, catch
from tests.support.demo import Blocks, run_all, shrink, some_rows


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


@pytest.mark.more
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


@pytest.fixture(scope="module")
def runs():
    return run_all(("device",))


@pytest.fixture(scope="module")
def all_runs():
    return run_all(tuple(_dqn.STORAGES))


@pytest.fixture(scope="module")
def all_columns():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compare_storages, "READS", 3)
        patch.setattr(_compare_storages, "_GROUP", 2)
        return _compare_storages.compare(some_rows(28))


@pytest.mark.more
def test_the_newest_rows_are_those_played(runs):
    check_newest(runs)


@pytest.mark.exhaustive
def test_the_newest_rows_of_every_storage_are_those_played(all_runs):
    check_newest(all_runs)


def check_newest(runs):
    one = runs["device"].newest
    assert one["obs"].shape == (30, 8, 84, 84) and one["action"].shape == (30, 8)
    for result in runs.values():
        jax.tree.map(np.testing.assert_array_equal, result.newest, one)
    # In order of time: the frame says how old its episode is.
    age, over = one["obs"][:, :, 0, 2].astype(int), one["terminated"] | one["truncated"]
    np.testing.assert_array_equal(age[1:], np.where(over[:-1], 1, age[:-1] + 1))
    np.testing.assert_array_equal(one["obs"][:, :, 0, 0], np.tile(np.arange(1, 9), (30, 1)))


@pytest.mark.more
def test_the_comparison_reports_a_single_bit(monkeypatch):
    class Wrong(fbuf.storages.Device):
        def read(self, rows, reads):
            leaves, ok = super().read(rows, reads)
            flipped = [x.at[(0,) * x.ndim].add(jnp.uint8(1)) if x.dtype == jnp.uint8 else x for x in leaves]
            return flipped, ok

    monkeypatch.setattr(_compare_storages, "READS", 1)
    monkeypatch.setattr(_dqn, "STORAGES", {"device": (device := fbuf.storages.Device), "wrong": Wrong, "again": device})
    columns = _compare_storages.compare(some_rows(8))
    assert [c.identical for c in columns] == [True, False, True]
    assert "DIFFERENT" in _report.storages(columns)


@pytest.mark.more
def test_the_network_acts_on_the_stacks_it_learns_from():
    actor = _run.Actor(Blocks("blocks", 4, 0), jax.random.key(0))
    params = _dqn.init_params(jax.random.key(1), 3)
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 4 * 40, lanes=4)
    replay, seen = buffer.init(_dqn.example_row()), []
    for _ in range(40):
        seen.append(actor.stacks)
        replay = buffer.extend(replay, actor.play(params, 1, epsilon=0.5))
    for stacks in seen[4:]:
        assert stacks.shape == (4, 4, 84, 84) and stacks.dtype == np.uint8
    acted = {stack.tobytes() for stacks in seen for stack in stacks}
    batch = buffer.peek(replay, jax.random.key(2), 256)
    assert batch.mask.all()
    drawn = np.asarray(batch.data["obs"])
    assert all(stack.tobytes() in acted for stack in drawn)
    # Starts of episodes are among them, with zeros before the first frame.
    assert (~drawn[:, 0].any(axis=(1, 2)) & drawn[:, -1].any(axis=(1, 2))).any()


@pytest.mark.more
def test_the_target_network_follows_every_period(runs):
    batch = jax.tree.map(jnp.asarray, runs["device"].batch)
    config = _dqn.Config(3, target_period=2)
    learn = jax.jit(lambda learner, batch: _dqn.learn(config, learner, batch), donate_argnums=0)
    learner = _dqn.init_learner(jax.random.key(0), config)
    first = jax.tree.map(np.array, learner.params)
    learner, _, _ = learn(learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, first)
    assert not np.array_equal(learner.params["conv1"]["kernel"], first["conv1"]["kernel"])
    learner, _, _ = learn(learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, learner.params)


@pytest.mark.more
def test_invalid_options_and_a_missing_extra_are_refused_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run, "run", None)
    cases = {
        "--game Brekout": r"--game 'Brekout' is none of .* Try breakout",
        "--steps 0": r"--steps is 0; expected 1 or more\. Use --steps 600",
        "--long --steps -1": r"--steps is -1",
        "--seed -1": r"--seed is -1; .* Use --seed 0",
        "--out .": r"--out \. does not end in \.png",
        "--out a.pdf": r"--out a\.pdf does not end in \.png\. Use --out a\.pdf\.png",
        "--out nowhere/a.png": r"--out nowhere/a\.png: No such file or directory\. Choose another",
        "--out /proc/a.png": r"--out /proc/a\.png: .* Choose another",
    }
    for arguments, message in cases.items():
        assert main(["demo", *arguments.split()]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ")
        assert re.search(message, captured.err)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "optax", None)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == 'error: optax is missing. Run: pip install "fbuf[demo]"\n'


SHORT = catch.Config(iterations=120, points=4)


@pytest.mark.more
def test_the_command_trains_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(catch, "Config", lambda: SHORT)
    assert catch.main(["--storage", "compressed", "--out", str(tmp_path / "curve.png")]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "jax, compressed" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.more
def test_newest_returns_the_rows_that_are_stored():
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 8 * 16)
    rows = some_rows(6)
    replay = buffer.extend(buffer.init(_dqn.example_row()), rows)
    for number, steps in ((40, 5), (47, 5), (48, 6), (1_000, 6)):
        found = _compare_storages.newest(buffer, replay, number)
        jax.tree.map(np.testing.assert_array_equal, found, {name: x[6 - steps :] for name, x in rows.items()})


@pytest.mark.more
def test_actions_are_greedy_or_random():
    params = _dqn.init_params(jax.random.key(0), 4)
    stacks = np.random.default_rng(0).integers(0, 255, (8, 4, 84, 84), np.uint8)
    best = np.argmax(np.asarray(jax.jit(_dqn.q_values)(params, stacks)), axis=-1)
    act = jax.jit(_dqn.act)
    key, one, zero = jax.random.key(5), np.float32(1), np.float32(0)
    for time in range(5):
        np.testing.assert_array_equal(act(params, stacks, key, np.int32(time), zero), best)
    drawn = np.stack([act(params, stacks, key, np.int32(time), one) for time in range(60)])
    assert (np.bincount(drawn.reshape(-1), minlength=4) > 60).all() and drawn.dtype == np.int32


@pytest.mark.exhaustive
def test_a_full_table_grows_and_training_stays_the_same(all_runs, monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(_compare_storages, "MOST_LOAD", 0.6)
    grown = _run.run("deduplicated", _run.Settings("blocks", seed=3, steps=8), Blocks)
    before = all_runs["deduplicated"]
    assert grown.blocks.grown > 0 and grown.blocks.slots > before.blocks.slots and grown.blocks.evicted == 0
    assert grown.device_bytes > before.device_bytes
    jax.tree.map(np.testing.assert_array_equal, grown.params, all_runs["device"].params)
    text = _report.table(grown)
    assert re.search(r"deduplicated: .* grown (once|twice|\d+ times); no row was evicted", text)


@pytest.mark.exhaustive
def test_masked_rows_teach_nothing():
    config = _dqn.Config(3)
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 80)
    batch = buffer.peek(buffer.init(_dqn.example_row()), jax.random.key(0), 4)
    assert not batch.mask.any()
    before = _dqn.init_learner(jax.random.key(0), config)
    before.params["out"]["bias"] += 1.0  # so that frames of zeros have an error, which only the weight takes away
    after, td_error, metrics = _dqn.learn(config, before, batch)
    assert metrics["loss"] == 0 and (np.abs(td_error) > 0.5).all()
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


@pytest.mark.exhaustive
def test_real_game_from_the_command_line(tmp_path, capsys, monkeypatch):
    shrink(monkeypatch)
    out = tmp_path / "pong.png"
    assert main(["demo", "--game", "Pong", "--steps", "3", "--storage", "host", "--out", str(out)]) == 0
    assert "pong, seed 0: 3 training steps" in capsys.readouterr().out and out.exists()


@pytest.mark.exhaustive
def test_every_storage_trains_alike(all_runs):
    assert len(all_runs) > 1
    first = all_runs["device"]
    assert np.isfinite(first.losses).all() and (first.losses > 0).all()
    for result in all_runs.values():
        np.testing.assert_array_equal(result.losses, first.losses)
        jax.tree.map(np.testing.assert_array_equal, result.params, first.params)
        assert result.episodes == first.episodes


@pytest.mark.exhaustive
def test_the_command_compares_storages(all_runs, all_columns, tmp_path, capsys, monkeypatch):
    assert [c.storage for c in all_columns] == list(_dqn.STORAGES) and all(c.identical for c in all_columns)
    monkeypatch.setattr(_run, "run", lambda *_: all_runs["device"])
    wrong = [*all_columns[:-1], dataclasses.replace(all_columns[-1], identical=False)]
    for found, status in ((all_columns, 0), (wrong, 1)):
        monkeypatch.setattr(_compare_storages, "compare", lambda rows, progress, found=found: found)
        assert main(["demo", "--compare", "--out", str(tmp_path / "demo.png")]) == status
        told = capsys.readouterr().out
        assert "every storage on the newest" in told and ("DIFFERENT" in told) == bool(status)


@pytest.mark.exhaustive
@pytest.mark.optimized
@pytest.mark.parametrize("storage", [name for name in catch.STORAGES if name != "device"])
def test_training_is_bit_exact_whichever_storage(storage):
    one, other = (
        catch.train(catch.make_buffer(catch.STORAGES[name](), SHORT, 512), 3, SHORT) for name in ("device", storage)
    )
    np.testing.assert_array_equal(one.curve, other.curve)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(one.curve) == 4 and -1 <= one.final <= 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("learner", [catch.train, catch.train_torch], ids=["jax", "torch"])
def test_it_learns_to_catch(learner):
    result = learner(catch.make_buffer())
    assert result.curve[0] < -0.5 and result.curve[-1] > 0.6  # a step in twenty is at random to the end
    assert result.final > 0.9
