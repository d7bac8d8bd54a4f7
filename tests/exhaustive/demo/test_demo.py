"""The demo with all storages, full tables and a real game, and training to catch: see `tests/more/demo/test_demo.py`."""

import dataclasses
import re
from collections.abc import Callable

import jax
import numpy as np
import pytest

import fbuf
import fbuf.testing
from fbuf.__main__ import main
from fbuf.demo import _command, _compare_storages, _dqn, _report, _run, catch
from tests.more.demo import test_demo as _more
from tests.more.demo.test_demo import (  # noqa: F401
    PNG,
    test_the_newest_rows_are_those_played,
)
from tests.support.demo import Blocks, shrink

runs, columns = _more.runs, _more.columns


@pytest.fixture(scope="module")
def names():
    return tuple(_dqn.STORAGES)


def test_a_full_table_grows_and_training_stays_the_same(runs, monkeypatch):
    shrink(monkeypatch)
    monkeypatch.setattr(_compare_storages, "MOST_LOAD", 0.6)
    grown = _run.run("deduplicated", _run.Settings("blocks", seed=3, steps=8), Blocks)
    before = runs["deduplicated"]
    assert grown.blocks.grown > 0 and grown.blocks.slots > before.blocks.slots and grown.blocks.evicted == 0
    assert grown.device_bytes > before.device_bytes
    jax.tree.map(np.testing.assert_array_equal, grown.params, runs["device"].params)
    text = _report.table(grown)
    assert re.search(r"deduplicated: .* grown (once|twice|\d+ times); no row gave way", text)


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


def test_real_game_from_the_command_line(tmp_path, capsys, monkeypatch):
    shrink(monkeypatch)
    out = tmp_path / "pong.png"
    assert main(["demo", "--game", "Pong", "--steps", "3", "--storage", "host", "--out", str(out)]) == 0
    assert "pong, seed 0: 3 training steps" in capsys.readouterr().out and out.exists()


def test_every_storage_trains_alike(runs):
    assert len(runs) > 1
    first = runs["device"]
    assert np.isfinite(first.losses).all() and (first.losses > 0).all()
    for result in runs.values():
        np.testing.assert_array_equal(result.losses, first.losses)
        jax.tree.map(np.testing.assert_array_equal, result.params, first.params)
        assert result.episodes == first.episodes


def test_storages_are_compared(names, columns):
    assert [c.storage for c in columns] == list(names)
    assert all(c.rows == 7 * 4 * 8 and c.identical and c.write > 0 and c.read > 0 for c in columns)
    by_name, frames = {c.storage: c for c in columns}, 7 * 4 * 8 * 7056
    assert by_name["device"].device_bytes > frames
    for name in {"host", "compressed"} & by_name.keys():
        assert by_name[name].host_bytes > 0
    assert by_name["deduplicated"].device_bytes < frames / 10
    assert by_name["deduplicated"].host_bytes == 0 and by_name["deduplicated"].blocks.evicted == 0
    text = _report.storages(columns)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith(("  ", "storage"))]
    lines = {head: cells for head, *cells in rows}
    assert lines["storage"] == list(names)
    assert lines["batches for one key"] == ["reference", *["identical"] * (len(names) - 1)]
    assert lines["raw stacks / all of it"][0] == "8x"
    assert max(map(len, text.splitlines())) <= 128


def test_figures_of_a_run_are_those_of_its_storage(runs):
    for name, result in runs.items():
        assert result.rows == 240  # 52 steps of 8 lanes were played: the ring came round
        assert result.memory[0][:2] == (24 * 8, 24 * 8) and result.memory[-1][:2] == (52 * 8, 240)
        assert set(result.seconds) == {"acting and emulators", "training steps"}
        assert result.steps_per_second > 0
        assert (result.host_bytes > 0) == (name in ("host", "compressed"))
        assert (result.blocks is not None) == (name == "deduplicated")
        assert result.batch.data["obs"].shape == (32, 4, 84, 84)
    frames = 240 * 7056
    assert runs["device"].device_bytes > frames and runs["deduplicated"].device_bytes < frames / 10
    if "host" in runs:
        assert runs["host"].host_bytes > frames and runs["compressed"].device_bytes < 50_000
    assert len(runs["device"].losses) == 8
    # The score counts what the game gave (3 a time), the rows hold its sign.
    assert {e.score % 3 for e in runs["device"].episodes} == {0.0} and runs["device"].batch.data["reward"].max() < 3


def test_the_table_names_storage_and_sizes(runs):
    for name, result in runs.items():
        text = _report.table(result)
        lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
        assert ["storage", name] in lines and ["rows held", "240"] in lines
        assert ["same rows as raw stacks", "13.5 MB"] in lines  # 240 rows of 8 frames
        assert max(map(len, text.splitlines())) <= 128


def test_the_command_runs_and_compares_storages(runs, columns, tmp_path, capsys, monkeypatch):
    asked = []

    def run(storage, settings, make_environment, progress):
        asked.append((storage, settings))
        progress(8, {"loss": "0.1"})
        return runs["device"]

    monkeypatch.setattr(_run, "run", run)
    out = tmp_path / "demo.png"
    wrong = [*columns[:-1], dataclasses.replace(columns[-1], identical=False)]
    for found, status in ((columns, 0), (wrong, 1)):
        monkeypatch.setattr(_compare_storages, "compare", lambda rows, progress, found=found: found)
        assert main(["demo", "--compare", "--seed", "1", "--out", str(out)]) == status
        captured = capsys.readouterr()
        assert "every storage on the newest" in captured.out and str(out) in captured.out
        assert ("DIFFERENT" in captured.out) == bool(status)
        assert "compressed" in captured.err  # the progress bar
        assert out.read_bytes().startswith(PNG)
    assert asked == [("compressed", _run.Settings("breakout", 1, _command.STEPS))] * 2
    assert main(["demo", "--long", "--out", str(out)]) == 0 and "every storage" not in capsys.readouterr().out
    assert asked[2] == ("compressed", _run.Settings("road_runner", 0, 3_000))


SHORT = catch.Config(iterations=120, points=4)


@pytest.mark.optimized
@pytest.mark.parametrize("storage", [name for name in catch.STORAGES if name != "device"])
def test_training_is_bit_exact_whichever_storage(storage: str) -> None:
    one, other = (
        catch.train(catch.make_buffer(catch.STORAGES[name](), SHORT, 512), 3, SHORT) for name in ("device", storage)
    )
    np.testing.assert_array_equal(one.curve, other.curve)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(one.curve) == 4 and -1 <= one.final <= 1


@pytest.mark.parametrize("learner", [catch.train, catch.train_torch], ids=["jax", "torch"])
def test_it_learns_to_catch(learner: Callable[..., catch.Result]) -> None:
    result = learner(catch.make_buffer())
    assert result.curve[0] < -0.5 and result.curve[-1] > 0.6  # a step in twenty is at random to the end
    assert result.final > 0.9


def test_the_network_learns_from_the_stacks_it_acted_on() -> None:
    buffer = fbuf.Buffer(64, view=fbuf.views.Transition(stack=catch.STACK, autoreset="same_step"), lanes=2)
    replay, actors, seen = buffer.init(catch.EXAMPLE), catch.first_actors(jax.random.key(0), 2), []
    play, add = jax.jit(catch.play), jax.jit(buffer.add)
    for number in range(20):
        seen.append(np.asarray(actors.stacks))
        actors, rows = play(actors, np.full(2, number % 3, np.int32), jax.random.key(number))
        replay = add(replay, rows)
    batch = jax.device_get(buffer.peek(replay, jax.random.key(1), 64))
    for slot, stack in zip(batch.index.slot, batch.data["obs"], strict=True):
        np.testing.assert_array_equal(stack, seen[slot // 2][slot % 2])
