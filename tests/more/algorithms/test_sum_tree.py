"""More of the sum tree: every capacity but the largest, other batch sizes, as JAX transforms it, exact biases."""

# ruff: noqa: F401, F811

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms import random_bits
from fbuf._algorithms import sum_tree as st
from tests.algorithms.test_sum_tree import path
from tests.support import sum_tree
from tests.support.tables import checks


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


test_checks = checks((sum_tree.check_keep_last, itertools.product([1, 2, 17], [None, 334, 2**32 // 17 - 5, 2**31])))
