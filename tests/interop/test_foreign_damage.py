"""Damaged files of other libraries; tier `exhaustive` has 10,000."""

import pytest

from tests.support.foreign import damage

pytestmark = pytest.mark.more


def test_damaged_files_are_refused_by_path_or_read_as_they_show(tmp_path):
    refused, read = damage.check(7, 4 * len(damage.CASES), tmp_path)
    assert refused > 10 and read > 10, (refused, read)
