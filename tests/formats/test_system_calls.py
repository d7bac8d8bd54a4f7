"""System calls of saves, loads, live stores, data sets and shards fail: old or new, whole, unlocked, nothing left over."""

import pytest

from tests.support.system_calls import check_system_calls

pytestmark = pytest.mark.more


def test_a_system_call_that_fails_loses_nothing(tmp_path):
    assert check_system_calls(7, 161, tmp_path) > 160  # 160 shares a factor with the 16 cases of each call


PARTS = 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(PARTS))
def test_each_system_call_that_fails_loses_nothing(part, tmp_path):
    assert check_system_calls(part, PARTS, tmp_path) > 300
