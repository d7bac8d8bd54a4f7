"""Algorithms at more sizes, with bad hashes, and as JAX transforms them."""

# ruff: noqa: F401, F811

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as some
from jax import lax

from fbuf._algorithms import block_stats, random
from fbuf._algorithms import sum_tree as st
from fbuf._algorithms.block_table import WAYS
from fbuf._core.control_flow import order_after_reads
from fbuf.storages import Deduplicated
from fbuf.testing import assert_inplace
from tests.algorithms.test_block_grid import check, shapes
from tests.algorithms.test_block_stats import device_bytes, game
from tests.algorithms.test_random import is_permutation, order
from tests.algorithms.test_sum_tree import path
from tests.support import sum_tree
from tests.support.block_table import WORDS, Model, check_load, hashing, some_blocks
from tests.support.tables import checks
from tests.support.trees import x64

pytestmark = pytest.mark.more


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

    fits = [Deduplicated(block=block).fit({"obs": frames}, capacity) for block in block_stats.candidates(84, 84, 1)]
    sizes = [device_bytes(fit, {"obs": frames}, capacity) for fit in fits]
    # Up to the ids of each lane's newest row, which are not weighed.
    assert device_bytes(chosen, {"obs": frames}, capacity) <= min(sizes) + 500
    assert max(sizes) > 1.3 * min(sizes)


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
            if refused:  # the lot before found few slots free; now there is none
                assert model.refused == refused
            for _ in range(3):
                model.release(1.0, seed, 100)
        assert model.live == 0 and len(model.contents()) < 65 and model.refused < 16


@pytest.mark.parametrize("n", [10**6, 2**20 + 1])
def test_one_to_one(n):
    assert is_permutation(order(n, n))


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


@pytest.mark.in_place
def test_writes_and_draws_copy_no_tree(path):
    capacity, batch = 10**6, 256
    tree, index = jax.ShapeDtypeStruct((st.nodes(capacity),), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)

    def step(state, key):
        tree, token = state
        token, (index, leaf) = order_after_reads(token, st.draw(tree, key, batch, capacity, stratified=True))
        return (st.set(tree, index + token, leaf + np.float32(1), capacity), token), index

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 10))
    assert_inplace(lambda t, i, leaf: st.set(t, i, leaf, capacity), tree, index, jax.ShapeDtypeStruct((batch,), "f4"))
    assert_inplace(lambda s, keys: lax.scan(step, s, keys), (tree, jax.ShapeDtypeStruct((), "i4")), keys, bound=2**17)


test_checks_on_both_paths = pytest.mark.usefixtures("path")(
    checks(
        (sum_tree.check_set, [(65_536, "sum"), (9, "max"), (1000, "min")]),
        (sum_tree.check_together, [1]),
        (sum_tree.check_one_leaf, [2, 65_536]),
        (sum_tree.check_strata, [10_000]),
        (sum_tree.check_frequencies, [1000]),
    )
)
test_checks = checks(
    (sum_tree.check_paths, [(1, 300), (300_000, st._MANY)]),
    (check_load, [(4096, "noise")]),
    (sum_tree.check_keep_last, itertools.product([1, 2, 17], [None, 334, 2**32 // 17 - 5, 2**31])),
)
