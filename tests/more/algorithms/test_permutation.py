"""More of keyed permutations: large numbers, vmap, neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._algorithms.permutation import permute
from tests.algorithms.test_permutation import LARGEST, is_permutation, key_of, order, permute_jit
from tests.support.uniformity import chi_square_z


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
