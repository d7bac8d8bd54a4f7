"""`fbuf._algorithms.block_table` against a dict (`tests/support/block_table.py`), its hashes, and counts near 2^32."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from fbuf._algorithms import block_table
from fbuf._algorithms.block_table import CHUNK_ITEMS, WAYS
from tests.support import block_table as support
from tests.support.block_table import (
    CONTENTS,
    DIGESTS,
    SIZE,
    WORDS,
    Model,
    check_load,
    check_rebuild,
    check_sequences,
    hashing,
    some_blocks,
)
from tests.support.platforms import as_on_gpus
from tests.support.tables import checks

MANY = 2**32 - 10  # references a place may have


def test_any_sequence_of_calls():
    support.check_sequences("3 bits", 160, 7)


@pytest.mark.more
def test_a_table_of_another_size_keeps_blocks_and_counts():
    support.check_rebuild("good", 1024)


@pytest.mark.more
@pytest.mark.parametrize(
    "digest", ["3 bits", *(pytest.param(name, marks=pytest.mark.more) for name in ("good", "constant"))]
)
def test_gpus_write_the_same_table(digest):
    with hashing(digest):
        model = Model(160, 7)
        insert, insert_on_gpus = model.calls.insert, jax.jit(functools.partial(support.put, chunk=7))

        def insert_both(*given):
            made = insert(*given)
            with as_on_gpus():
                jax.tree.map(np.testing.assert_array_equal, made, insert_on_gpus(*given))
            return made

        model.calls = model.calls._replace(insert=insert_both)
        for seed in range(24):
            model.write(some_blocks(support.SIZE, (12, 80, 2**32)[seed % 3], seed), support.SIZE - seed % 2, seed)
            if seed % 4 == 3:
                model.release(0.3, seed, 2 * support.SIZE)
    assert model.refused > 0  # the table was full


@pytest.mark.more
def test_places_are_given_in_order_of_arrival():
    model = support.Model(64, 8)
    blocks = support.some_blocks(60, 2**32, 0)
    order = np.arange(60, dtype=np.int32)
    placed = model.insert(blocks, order, 60)
    assert np.asarray(placed.place).tolist() == list(range(1, 61))
    table, _ = model.calls.refer(model.table, placed.place, np.ones((60,), bool), placed.won)
    model.table, _ = model.calls.release(table, np.array([5, 6, 7, 40, 41, 0], np.int32))
    place = np.asarray(model.calls.insert(model.table, support.some_blocks(60, 2**32, 1), order, np.int32(10))[1].place)
    assert place[:10].tolist() == [61, 62, 63, 5, 6, 7, 40, 41, 0, 0]


@pytest.mark.more
def test_hashes_of_blocks_that_are_nearly_alike():
    base = np.random.default_rng(0).integers(0, 256, 144).astype(np.uint8)
    near = np.tile(base, (2**15, 1))
    at = np.arange(2**15)
    near[at, at % 144] ^= (1 + at // 144 % 255).astype(np.uint8)
    near[at, (at % 144 + 1 + at // 36720) % 144] ^= (at // 36720).astype(np.uint8)
    for blocks in (
        near.view(np.uint32),
        support.sprites(2**15),
        support.CONTENTS["counter"](2**15),
        np.eye(2**11, 36, dtype=np.uint32),
    ):
        blocks = np.unique(blocks, axis=0)
        first, second = (np.asarray(h).astype(np.uint64) for h in jax.jit(support.GOOD)(blocks))
        assert len(np.unique(first << np.uint64(32) | second)) == len(blocks)
        assert len(blocks) - len(np.unique(second)) <= 4  # 0.1 are expected
        if len(blocks) < 2**14:
            continue
        both = first % np.uint64(32) * np.uint64(32) + second % np.uint64(32)  # neither says anything of the other
        for hashes in (first, second, both):
            for buckets in [1024] if hashes is both else [128, 2047]:
                counts = np.bincount((hashes % np.uint64(buckets)).astype(np.int64), minlength=buckets)
                mean = len(blocks) / buckets
                excess = ((counts - mean) ** 2 / mean).sum() / (buckets - 1)
                assert abs(excess - 1) < 5 * np.sqrt(2 / (buckets - 1)), f"{buckets} buckets: chi-square {excess:.2f}"


def table_of(counts):
    """A table with these counts from place 1 on, and distinct blocks."""
    places = -(-(len(counts) + 1) // WAYS) * WAYS
    number = np.arange(places, dtype=np.uint32)
    count = np.zeros((places,), np.uint32)
    count[0], count[1 : len(counts) + 1] = 1, counts
    tally = jnp.array([np.count_nonzero(counts), 1], jnp.uint32)
    empty = block_table.init(places, 1)
    return dataclasses.replace(empty, words=jnp.asarray(number[:, None]), count=jnp.asarray(count), tally=tally)


@given(
    some.lists(some.integers(1, 9), min_size=1, max_size=40),
    some.lists(some.integers(0, 9), min_size=1, max_size=40),
    some.integers(0, 2**32 - 1),
)
@example([400], [400], 0)
@example([399], [400], 0)
@example([3] * 133, [0], 0)
@example([1] * 400, [0], 0)
def test_release_counts_blocks_without_references(gone, kept, seed):
    draw = np.random.default_rng(seed)
    counts = np.array([*gone, *(k + 1 for k in kept)], np.uint32)
    lost = np.array([*gone, *kept])
    ids = np.repeat(np.arange(1, len(lost) + 1), lost)
    ids = draw.permutation(np.concatenate([ids, np.zeros((800 - len(ids),), ids.dtype)])).astype(np.int32)
    start = table_of(np.concatenate([counts, np.zeros((512 - len(counts),), np.uint32)]))
    table, _ = support.RELEASE(start, ids)
    assert int(start.live) - int(table.live) == len(gone)
    np.testing.assert_array_equal(np.asarray(table.count)[1 : len(lost) + 1], counts - lost)


def test_release_counts_right_for_its_most_items():
    """`CHUNK_ITEMS` references, `each` to every block: the sum of reciprocals is furthest from whole numbers."""
    for each in (1, 2, 3, 7, 181, 3000, CHUNK_ITEMS - 1, CHUNK_ITEMS):
        blocks = CHUNK_ITEMS // each
        ids = np.resize(np.arange(1, blocks + 1, dtype=np.int32), CHUNK_ITEMS)
        ids[blocks * each :] = 0
        counts = np.zeros((CHUNK_ITEMS,), np.uint32)
        counts[:blocks] = each
        table, _ = support.RELEASE(table_of(counts), ids)
        assert int(table.live) == 0 and np.asarray(table.count).sum() == 1


def test_counts_near_2_to_the_32():
    counts = np.array([MANY, 2**31, 2**31 - 1, 3], np.uint32)
    ids = np.repeat(np.arange(5, dtype=np.int32), 8)
    every, none = np.ones((40,), bool) & (ids != 0), np.zeros((40,), bool)
    start = table_of(counts)
    table, _ = support.REFER(start, ids, every, none)
    assert int(table.live) == 4
    np.testing.assert_array_equal(np.asarray(table.count)[:5], [1, MANY + 8, 2**31 + 8, 2**31 + 7, 11])
    table, _ = support.RELEASE(table, ids)
    assert int(table.live) == 4
    jax.tree.map(np.testing.assert_array_equal, table, start)
    fewer = np.array([1, 1, 1, 2, 2, 3, 4, 4, 4], np.int32)
    table, _ = support.RELEASE(table, fewer)
    np.testing.assert_array_equal(np.asarray(table.count)[:5], [1, MANY - 3, 2**31 - 2, 2**31 - 2, 0])
    assert int(table.live) == 3


@pytest.mark.more
def test_one_bucket_pair_is_used_to_its_last_place():
    with hashing("constant"):
        model = Model(320, 16)
        room = WAYS * 2 - (0 in model.buckets(np.zeros((1, WORDS), np.uint32)))
        placed = model.write(some_blocks(100, 2**32, 0), 100, 0)
        assert np.asarray(placed.won).sum() == room and model.refused == 100 - room
        model = Model(320, 16)
        for seed in range(9):
            refused = model.refused
            model.write(some_blocks(100, 2**32, seed), 16, seed)
            if refused:  # the chunk before found few slots free; now there is none
                assert model.refused == refused
            for _ in range(3):
                model.release(1.0, seed, 100)
        assert model.live == 0 and len(model.contents()) < 65 and model.refused < 16


test_tables_of_every_hash_and_load = checks(
    more=[(check_load, [(4096, "noise")])],
    exhaustive=[
        *((check_sequences, [(digest, 64, SIZE), (digest, 160, 7)]) for digest in DIGESTS),
        (check_load, itertools.product([4096, 65_504], CONTENTS)),
        (check_rebuild, itertools.product(DIGESTS, [64, 1024])),
    ],
)


def test_slots_of_buckets_read_by_line_or_one_by_one():
    slots = np.random.default_rng(0).permutation(3 * WAYS).astype(np.uint32)
    bucket = np.array([[2, 0], [1, 1]], np.int32)
    for form in (block_table._lines, block_table._elements):
        np.testing.assert_array_equal(form(jnp.asarray(slots), jnp.asarray(bucket)), slots.reshape(3, WAYS)[bucket])
