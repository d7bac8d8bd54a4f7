"""Further cases of combinations: see `tests/contracts/test_combinations.py`."""

import jax
import numpy as np
import pytest

from tests.support.combinations import (
    REFUSED,
    SAMPLERS,
    SOME,
    STORAGES,
    UNORDERED,
    UNORDERED_STORAGES,
    UNORDERED_WRITERS,
    VIEWS,
    batches,
    check_storages_agree,
)


@pytest.mark.parametrize(
    ("sampler", "view"), [(s, v) for s in SAMPLERS for v in VIEWS if (s, v) not in {*REFUSED, *SOME}]
)
def test_storages_give_the_same_batches_in_every_combination(sampler, view):
    check_storages_agree(STORAGES, sampler, view)


@pytest.mark.parametrize("sampler", UNORDERED)
@pytest.mark.parametrize("writer", UNORDERED_WRITERS)
def test_storages_give_writers_the_same_batches_with_every_sampler(writer, sampler):
    check_storages_agree(UNORDERED_STORAGES, sampler, "Row", writer)


@pytest.mark.parametrize("view", VIEWS)
def test_where_priorities_live_does_not_matter(view):
    for one, two in zip(
        batches("Device", "Prioritized", view), batches("Device", "Prioritized(on='host')", view), strict=True
    ):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))
