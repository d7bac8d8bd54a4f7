"""Each system call of saves, loads, live stores, data sets and shards fails with each error: 25,000 cases."""

import pytest

from tests.support.system_calls import check_system_calls

pytestmark = pytest.mark.exhaustive

PARTS = 60


@pytest.mark.parametrize("part", range(PARTS))
def test_each_system_call_that_fails_loses_nothing(part, tmp_path):
    assert check_system_calls(part, PARTS, tmp_path) > 300
