"""Counts of every dtype and layout, and `Deduplicated.fit` on ten games."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms import block_grid, block_stats
from fbuf.storages import Deduplicated
from tests.support.block_stats import blocks_of, distinct, game, held

GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")


def test_ten_games_from_their_first_2000_frames():
    """What the rule comes to at 20,000 frames, against 4-stacks and next 4-stacks; a table 90 % full grows by half."""
    atari = pytest.importorskip("benchmarks._atari")
    pytest.importorskip("ale_py")
    ratios = {}
    for name in GAMES:
        frames, _ = atari.frames(name, 20_000)
        storage = Deduplicated(keys=("obs",)).fit({"obs": frames[:2000]}, 20_000)
        grid = block_grid.grid(jax.ShapeDtypeStruct((84, 84), jnp.uint8), storage.block)
        found = block_stats.count([(frames, grid)], [(grid.rows, grid.words)])[0].distinct[-1]
        places, grown = storage.blocks, 0
        while found > 0.9 * places:
            places, grown = math.ceil(1.5 * places / 32) * 32, grown + 1
        assert grown <= 1 and found > 0.3 * places, name
        size = block_stats.table_bytes(20_000 * grid.blocks, places, grid.block_words)
        ratios[name] = 20_000 * 8 * 7056 / size
    means = [math.exp(sum(math.log(ratios[name]) for name in names) / len(names)) for names in (GAMES, GAMES[:6])]
    assert means[0] >= 100 and means[1] >= 120 and min(ratios.values()) >= 25, ratios


def test_leaves_of_other_frames_get_their_own():
    rng = np.random.default_rng(0)
    rows = {"obs": game(100), "depth": rng.normal(size=(100, 40, 40)).astype(np.float32)}
    storage = Deduplicated(on_full="refuse").fit(rows, 100)
    block, places = dict(storage.block), dict(storage.blocks)
    assert set(block) == set(places) == {"obs", "depth"}
    grids = {name: block_grid.grid(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), block[name]) for name, x in rows.items()}
    found = sum(distinct(blocks_of(x, grids[name]), 100) for name, x in rows.items())
    assert 0.7 * sum(places.values()) < found < 0.96 * sum(places.values())
    assert held(storage, rows, 100, step=20)["refused_rows"] == 0


def test_lanes():
    lanes = np.stack([game(500, seed) for seed in range(4)], 1)
    storage = Deduplicated(keys=("obs",)).fit({"obs": lanes}, 2000, lanes=4)
    stats = held(storage, {"obs": lanes}, 2000, lanes=4)
    assert stats["refused_rows"] == stats["retired_rows"] == 0 and stats["blocks_load"] > 0.6


def test_leaves_of_the_same_frames_share_block_and_table():
    frames = game(1001)
    rows = {"obs": frames[:-1], "next": {"obs": frames[1:]}, "reward": np.zeros(1000, np.float32)}
    storage = Deduplicated().fit(rows, 1000)
    block, places = dict(storage.block), dict(storage.blocks)
    assert set(block) == set(places) == {"obs", "next/obs"}
    assert block["obs"] == block["next/obs"]
    stats = held(storage, rows, 1000)
    assert stats["refused_rows"] == stats["retired_rows"] == 0
    alone = Deduplicated(block=block["obs"]).fit({"obs": frames}, 1001)
    assert sum(places.values()) <= alone.blocks + 32
    known = Deduplicated(block={"obs": (14, 28)}, blocks={"obs": 640}).fit(rows, 1000)
    assert dict(known.block) == {"obs": (14, 28), "next/obs": (14, 28)}
    assert dict(known.blocks)["obs"] == 640
    for_all = Deduplicated(block=(14, 28)).fit(rows, 1000)
    assert sum(dict(known.blocks).values()) == sum(dict(for_all.blocks).values())
