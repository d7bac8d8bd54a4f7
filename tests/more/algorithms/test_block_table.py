"""`fbuf._algorithms.block_table`: bad hashes, load, loops and rebuilding."""

import jax
import numpy as np

from fbuf._algorithms import block_table
from fbuf._algorithms.block_table import WAYS
from tests.support.block_table import WORDS, Model, check_load, check_turnover, hashing, some_blocks
from tests.support.tables import checks


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_rebuilding_a_full_table_into_one_hardly_larger_loses_nothing():
    model = Model(1024, 64)
    blocks = some_blocks(1023, 2**32, 0)
    model.table, placed, _ = model.calls.insert(model.table, blocks, np.arange(1023, dtype=np.int32), 1023)
    assert np.asarray(placed.place).all()
    made, moved, lost = block_table.rebuild(model.table, 1056)
    assert int(lost) == 0 and int(made.live) == 1023
    np.testing.assert_array_equal(np.asarray(made.words)[np.asarray(moved)[1:]], np.asarray(model.table.words)[1:])


def test_one_bucket_pair_is_used_to_its_last_place():
    """All blocks want the same 64 slots: they get every one and no other, and again when nothing refers to their blocks."""
    with hashing("constant"):
        model = Model(320, 16)
        room = WAYS * 2 - (0 in model.buckets(np.zeros((1, WORDS), np.uint32)))
        placed = model.write(some_blocks(100, 2**32, 0), 100, 0)
        assert np.asarray(placed.won).sum() == room and model.refused == 100 - room
        model = Model(320, 16)
        for seed in range(9):
            refused = model.refused
            model.write(some_blocks(100, 2**32, seed), 16, seed)
            if refused:  # the lot before found few slots free; now there is none
                assert model.refused == refused
            for _ in range(3):
                model.release(1.0, seed, 100)
        assert model.live == 0 and len(model.contents()) < 65 and model.refused < 16


test_checks = checks((check_load, [(4096, "noise")]), (check_turnover, [(320, 64)]))
