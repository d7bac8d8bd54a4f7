"""Algorithms at more sizes, with bad hashes, and as JAX transforms them."""

# ruff: noqa: F401, F811

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as some

from fbuf._algorithms import block_stats, block_table, random_bits
from fbuf._algorithms import sum_tree as st
from fbuf._algorithms.block_table import WAYS
from fbuf._algorithms.permutation import permute
from fbuf.storages import Deduplicated
from tests.algorithms.test_block_grid import check, shapes
from tests.algorithms.test_block_stats import device_bytes, game, held
from tests.algorithms.test_permutation import LARGEST, is_permutation, key_of, order, permute_jit
from tests.algorithms.test_sum_tree import path
from tests.support import sum_tree
from tests.support.block_table import WORDS, Model, check_load, check_turnover, hashing, some_blocks
from tests.support.tables import checks
from tests.support.trees import x64
from tests.support.uniformity import chi_square_z


@given(
    shape=shapes,
    dtype=some.sampled_from(["uint8", "bool", "bfloat16", "float32"]),
    block=some.one_of(some.none(), some.tuples(some.integers(1, 20), some.integers(1, 20))),
    seed=some.integers(0, 2**32 - 1),
)
@example(shape=(1, 1, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 5, 4), dtype="uint8", block=(3, 4), seed=0)
@example(shape=(5, 4, 4), dtype="uint8", block=(3, 4), seed=0)
def test_any_shape_and_block(shape, dtype, block, seed):
    channels = shape[-1] if len(shape) >= 3 and shape[-1] < 4 else 1
    assume(block is None or block[1] * channels * jnp.dtype(dtype).itemsize % 4 == 0)
    check(shape, dtype, block, rows=2, seed=seed)


def test_64_bit_dtypes_come_back_to_the_bit():
    with x64():
        check((9, 11, 3), "int64", None)
        check((9, 7, 4), "float64", (2, 3))


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


@pytest.mark.parametrize("n", [10**6, 2**20 + 1])
def test_one_to_one(n):
    assert is_permutation(order(n, n))


@pytest.mark.parametrize("n", [2**30 + 7, LARGEST])
def test_no_two_alike_among_some_places_of_very_many(n):
    index = np.unique(np.random.default_rng(0).integers(0, n, 2**19)).astype(np.int32)
    got = np.asarray(permute_jit(key_of(n), jnp.asarray(index), jnp.int32(n)))
    assert got.min() >= 0 and got.max() < n and len(np.unique(got)) == len(index)
    assert abs(got.mean() / n - 0.5) < 5 / np.sqrt(12 * len(index))


def test_vmap_walks_each_as_far_as_alone():
    sizes, index = [1, 5, 1000, 10**6, 2**30], jnp.arange(40, dtype=jnp.int32)
    keys = jnp.stack([key_of(seed) for seed in range(5)])
    together = jax.jit(jax.vmap(permute, (0, None, 0)))(keys, index, jnp.asarray(sizes, jnp.int32))
    for got, key, n in zip(together, keys, sizes, strict=True):
        np.testing.assert_array_equal(got, permute_jit(key, index, jnp.int32(n)))


def test_within_one_order_near_places_hold_unrelated_values():
    """One long order: where the values of each place and the next lie, in a grid of 32 by 32."""
    n = 10**6
    got = order(3, n).astype(np.int64) * 32 // n
    for step in (1, 2, 1000, 1001):  # 1000 is a column of the rectangle
        counts = np.bincount(got[:-step] * 32 + got[step:], minlength=1024)
        assert abs(chi_square_z(counts, np.full(1024, 1 / 1024))) < 4


@pytest.mark.parametrize(("capacity", "reduce"), [(65_536, "sum"), (9, "max"), (1000, "min")])
def test_set_is_what_a_plain_array_does(path, capacity, reduce):
    sum_tree.check_set(capacity, reduce)


def test_trees_written_together_hold_what_plain_arrays_do(path):
    sum_tree.check_together(1)


@pytest.mark.parametrize("capacity", [2, 65_536])
def test_one_leaf_or_none(path, capacity):
    sum_tree.check_one_leaf(capacity)


@pytest.mark.parametrize(("capacity", "batch"), [(1, 300), (1000, 16_384)])
def test_both_paths_draw_the_same(capacity, batch, monkeypatch):
    sum_tree.check_paths(capacity, batch, monkeypatch)


@pytest.mark.gpu
def test_accelerator_draws_and_writes_as_the_cpu():
    capacity = 1_000_003
    leaves = np.random.default_rng(2).lognormal(0, 3, capacity).astype(np.float32)
    results = []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            tree = jnp.asarray(sum_tree.expected_tree(leaves))
            index, leaf = sum_tree.drawer(capacity, 4096, True)(tree, jax.random.key(0))
            tree = sum_tree.setter(capacity)(tree, index, leaf + 1)
            results.append((np.asarray(index), np.asarray(tree)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


@pytest.mark.parametrize("capacity", [10_000])
def test_strata_bound_the_count_of_every_leaf_or_block(path, capacity):
    sum_tree.check_strata(capacity)


@pytest.mark.parametrize("capacity", [1000])
def test_draws_follow_the_leaves(path, capacity):
    sum_tree.check_frequencies(capacity)


def test_gradients_pass_by(path):
    tree = st.rebuild(jnp.ones((100,), jnp.float32))

    def loss(x):
        index, _ = st.draw(tree * x, jax.random.key(0), 8, 100, stratified=False)
        new = st.set(tree, index, jnp.full((8,), x), 100)
        _, leaf = st.draw(new, jax.random.key(1), 8, 100, stratified=False)
        return jnp.sum(leaf) + x

    value, slope = jax.jit(jax.value_and_grad(loss))(jnp.float32(3))
    assert np.isfinite(value) and slope == 1


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_words_of_any_key(kind):
    """The same however long the batch, other for every key."""
    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    first, second = map(jnp.stack, zip(*(random_bits.pairs(key, 9) for key in keys), strict=True))
    words = np.concatenate([first, second]).ravel()
    assert words.dtype == np.uint32 and len(np.unique(words)) == 54
    for key, one, other in zip(keys, first, second, strict=True):
        short = jax.jit(lambda key: random_bits.pairs(key, 4))(key)
        np.testing.assert_array_equal(short[0], one[:4])
        np.testing.assert_array_equal(short[1], other[:4])


test_checks = checks(
    (check_load, [(4096, "noise")]),
    (check_turnover, [(320, 64)]),
    (sum_tree.check_keep_last, itertools.product([1, 2, 17], [None, 334, 2**32 // 17 - 5, 2**31])),
)
