"""States after writes that failed, of all storages, views and samplers."""

import itertools

import pytest

from tests.support.failing_writes import SAMPLERS, STORAGES, VIEWS, check

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(("storage", "view", "sampler"), list(itertools.product(STORAGES, VIEWS, SAMPLERS)))
def test_a_write_that_failed_is_one_of_the_rows_that_were_stored(storage, view, sampler, tmp_path):
    check(storage, view, sampler, 1, str(tmp_path / "store"))
