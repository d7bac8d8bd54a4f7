"""The demo: storages train alike, rows are those played, mistakes are described, and Double DQN learns to catch."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.testing
from fbuf.__main__ import main
from fbuf.demo import _compare_storages, _dqn, _report, _run, catch
from tests.support.demo import Blocks, run_all, some_rows

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def names():
    return ("device",)


@pytest.fixture(scope="module")
def runs(names):
    return run_all(names)


@pytest.fixture(scope="module")
def columns(names):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compare_storages, "READS", 3)
        patch.setattr(_compare_storages, "_GROUP", 2)
        patch.setattr(_dqn, "STORAGES", {name: _dqn.STORAGES[name] for name in names})
        return _compare_storages.compare(some_rows(28))


def test_the_newest_rows_are_those_played(runs):
    one = runs["device"].newest
    assert one["obs"].shape == (30, 8, 84, 84) and one["action"].shape == (30, 8)
    for result in runs.values():
        jax.tree.map(np.testing.assert_array_equal, result.newest, one)
    # In order of time: the frame says how old its episode is.
    age, over = one["obs"][:, :, 0, 2].astype(int), one["terminated"] | one["truncated"]
    np.testing.assert_array_equal(age[1:], np.where(over[:-1], 1, age[:-1] + 1))
    np.testing.assert_array_equal(one["obs"][:, :, 0, 0], np.tile(np.arange(1, 9), (30, 1)))


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


def test_the_target_network_follows_every_period(runs):
    batch = jax.tree.map(jnp.asarray, runs["device"].batch)
    config = _dqn.Config(3, target_period=2)
    learn = _dqn.make_learn(config)
    learner = _dqn.init_learner(jax.random.key(0), config)
    first = jax.tree.map(np.array, learner.params)
    learner, _, _ = learn(learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, first)
    assert not np.array_equal(learner.params["conv1"]["kernel"], first["conv1"]["kernel"])
    learner, _, _ = learn(learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, learner.params)


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


def test_the_command_trains_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(catch, "Config", lambda: SHORT)
    assert catch.main(["--storage", "compressed", "--out", str(tmp_path / "curve.png")]) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "jax, compressed" in out
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_newest_returns_the_rows_that_are_stored():
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 8 * 16)
    rows = some_rows(6)
    replay = buffer.extend(buffer.init(_dqn.example_row()), rows)
    for number, steps in ((40, 5), (47, 5), (48, 6), (1_000, 6)):
        found = _compare_storages.newest(buffer, replay, number)
        jax.tree.map(np.testing.assert_array_equal, found, {name: x[6 - steps :] for name, x in rows.items()})


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
