"""`Deduplicated.fit`: the choice among all candidates, leaves together and apart, lanes and noise."""

from __future__ import annotations

import numpy as np

from fbuf._algorithms import block_stats
from fbuf.storages import Deduplicated
from tests.support.block_stats import device_bytes, game, held


def test_the_choice_is_the_smallest_of_all_candidates() -> None:
    frames = game(600)
    capacity = 6000
    chosen = Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity)

    sizes = [
        device_bytes(Deduplicated(block=block).fit({"obs": frames}, capacity), {"obs": frames}, capacity)
        for block in block_stats.candidates(84, 84, 1)
    ]
    # Up to the ids of each lane's newest row, which are not weighed, and to what faster reading is worth.
    assert device_bytes(chosen, {"obs": frames}, capacity) <= min(sizes) / block_stats.WORTH + 500
    assert max(sizes) > 1.3 * min(sizes)


def test_leaves_of_the_same_frames_share_block_and_table() -> None:
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


def test_a_fitted_storage_holds_the_rows() -> None:
    rows = {"obs": game(1000), "action": np.arange(1000, dtype=np.int32)}
    stats = held(Deduplicated().fit({name: x[:400] for name, x in rows.items()}, 1000), rows, 1000)
    assert stats["refused_rows"] == stats["retired_rows"] == 0
    assert 0.3 < stats["blocks_load"] < 0.95
