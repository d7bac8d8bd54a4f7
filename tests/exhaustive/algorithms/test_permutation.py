"""Keyed permutations of very many numbers."""

import pytest

from tests.algorithms.test_permutation import is_permutation, order


@pytest.mark.parametrize("n", [2**20 - 1, 2**24 - 1, 2**24 + 1, 5 * 10**7, 4999**2, 4999**2 + 1])
def test_one_to_one(n):
    assert is_permutation(order(n, n))
