"""The demo with all storages, full tables and a real game, and training to catch: see `tests/demo/test_demo_more.py`."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import fbuf
import fbuf.testing
from fbuf.__main__ import main
from fbuf.demo import _compare_storages, _dqn, _report, _run, catch
from tests.demo import test_demo_more as _more
from tests.demo.test_demo_more import (  # noqa: F401
    SHORT,
    test_the_newest_rows_are_those_played,
)
from tests.support.demo import Blocks, shrink

pytestmark = pytest.mark.exhaustive

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
    assert re.search(r"deduplicated: .* grown (once|twice|\d+ times); no row was evicted", text)


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


def test_the_command_compares_storages(runs, columns, tmp_path, capsys, monkeypatch):
    assert [c.storage for c in columns] == list(_dqn.STORAGES) and all(c.identical for c in columns)
    monkeypatch.setattr(_run, "run", lambda *_: runs["device"])
    wrong = [*columns[:-1], dataclasses.replace(columns[-1], identical=False)]
    for found, status in ((columns, 0), (wrong, 1)):
        monkeypatch.setattr(_compare_storages, "compare", lambda rows, progress, found=found: found)
        assert main(["demo", "--compare", "--out", str(tmp_path / "demo.png")]) == status
        told = capsys.readouterr().out
        assert "every storage on the newest" in told and ("DIFFERENT" in told) == bool(status)


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


@pytest.mark.parametrize("learner", [catch.train, catch.train_torch], ids=["jax", "torch"])
def test_it_learns_to_catch(learner):
    result = learner(catch.make_buffer())
    assert result.curve[0] < -0.5 and result.curve[-1] > 0.6  # a step in twenty is at random to the end
    assert result.final > 0.9
