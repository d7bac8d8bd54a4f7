"""The demo with all storages, full tables and a real game: see `tests/more/demo/test_demo.py`."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf.demo import _compare_storages, _dqn, _report, _run
from tests.more.demo import test_demo as _more
from tests.more.demo.test_demo import (  # noqa: F401
    test_every_storage_trains_alike,
    test_figures_of_a_run_are_those_of_its_storage,
    test_storages_are_compared,
    test_the_newest_rows_are_those_played,
    test_the_table_names_storages_and_sizes,
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
    assert "growing and compiling again" in grown.seconds
    assert _report.identical(runs["device"], grown)
    text = _report.table([runs["device"], grown])
    assert re.search(r"deduplicated: .* grown (once|twice|\d+ times); no row gave way", text) and "identical" in text
    assert re.search(r"loop: growing and compiling again +0% +\d+%", text)


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
