"""Algorithms at every size, with every hash and layout, and in place."""

# ruff: noqa: F401, F811

import itertools

import numpy as np
import pytest

from fbuf.storages import Deduplicated
from tests.algorithms.test_block_stats import game, held
from tests.algorithms.test_random import is_permutation, order
from tests.algorithms.test_sum_tree import path
from tests.support import block_table, sum_tree
from tests.support.block_table import SIZE, check_rebuild, check_sequences
from tests.support.tables import checks

pytestmark = pytest.mark.exhaustive


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


@pytest.mark.parametrize("n", [2**20 - 1, 2**24 - 1, 2**24 + 1, 5 * 10**7, 4999**2, 4999**2 + 1])
def test_one_to_one(n):
    assert is_permutation(order(n, n))


CAPACITIES = [1, 2, 7, 8, 9, 64, 65, 1000, 65_536, 1_000_003]
LARGEST = CAPACITIES[-1]
SET = [*((c, "sum") for c in CAPACITIES), *itertools.product((1, 9, 1000), ("min", "max"))]
test_checks_on_both_paths = pytest.mark.usefixtures("path")(
    checks(
        (sum_tree.check_set, SET),
        (sum_tree.check_zero_leaves, [1, 8, 65, LARGEST]),
        (sum_tree.check_strata, [64, LARGEST]),
        (sum_tree.check_one_leaf, [7]),
    )
)
test_checks = checks(
    *((block_table.check_sequences, [(digest, 64, SIZE), (digest, 160, 7)]) for digest in block_table.DIGESTS),
    (block_table.check_load, itertools.product([4096, 65_504], block_table.CONTENTS)),
    (block_table.check_rebuild, itertools.product(block_table.DIGESTS, [64, 1024])),
    (sum_tree.check_rebuild, itertools.product(CAPACITIES, ["sum", "min", "max"])),
    (sum_tree.check_every_row, [2**18, 2**24]),
    (sum_tree.check_paths, [(1, 1), (9, 16_384), (65, 1), *((LARGEST, batch) for batch in (1, 300, 16_384))]),
)
