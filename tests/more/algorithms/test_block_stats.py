"""`Deduplicated.fit`: the choice among all candidates, leaves together and apart, lanes and noise."""

import numpy as np

from fbuf._algorithms import block_stats
from fbuf.storages import Deduplicated
from tests.support.block_stats import device_bytes, game, held


def test_the_choice_is_the_smallest_of_all_candidates():
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


def test_a_fitted_storage_holds_the_rows():
    rows = {"obs": game(1000), "action": np.arange(1000, dtype=np.int32)}
    stats = held(Deduplicated().fit({name: x[:400] for name, x in rows.items()}, 1000), rows, 1000)
    assert stats["refused_rows"] == stats["retired_rows"] == 0
    assert 0.3 < stats["blocks_load"] < 0.95
