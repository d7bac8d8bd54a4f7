"""Further cases of combinations: see `tests/contracts/test_combinations.py`."""

import pytest

from tests.support.combinations import SOME, check_storages_agree


@pytest.mark.parametrize(("sampler", "view"), SOME)
def test_storages_give_the_same_batches(sampler, view):
    check_storages_agree(["Deduplicated", "Compressed", "Host", "Ragged"], sampler, view)
