"""Further cases of combinations: see `tests/contracts/test_combinations.py`."""

import jax
import numpy as np
import pytest

from tests.support import combinations


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        (s, v)
        for s in combinations.SAMPLERS
        for v in combinations.VIEWS
        if (s, v) not in {*combinations.REFUSED, *combinations.SOME}
    ],
)
def test_storages_give_the_same_batches_in_every_combination(sampler, view):
    combinations.check_storages_agree(combinations.STORAGES, sampler, view)


@pytest.mark.parametrize("sampler", combinations.UNORDERED)
@pytest.mark.parametrize("writer", combinations.UNORDERED_WRITERS)
def test_storages_give_writers_the_same_batches_with_every_sampler(writer, sampler):
    combinations.check_storages_agree(combinations.UNORDERED_STORAGES, sampler, "Row", writer)


@pytest.mark.parametrize("view", combinations.VIEWS)
def test_where_priorities_live_does_not_matter(view):
    for one, two in zip(
        combinations.batches("Device", "Prioritized", view),
        combinations.batches("Device", "Prioritized(on='host')", view),
        strict=True,
    ):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))
