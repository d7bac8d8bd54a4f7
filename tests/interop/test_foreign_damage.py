"""Damaged files of other libraries; tier `exhaustive` has 10,000."""

import pytest

from tests.support.foreign import damage
from tests.support.processes import run_python

pytestmark = pytest.mark.more


def test_damaged_files_are_refused_by_path_or_read_as_they_show(tmp_path):
    refused, read = damage.check(7, 4 * len(damage.CASES), tmp_path)
    assert refused > 10 and read > 10, (refused, read)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
def test_10_000_damaged_files_are_refused_by_path_or_read_as_they_show(seed, tmp_path):
    code = """
    import sys
    from tests.support.foreign import damage
    print(*damage.check(int(sys.argv[1]), 250, sys.argv[2]))
    """
    refused, read = map(int, run_python(code, seed, tmp_path).stdout.split()[-2:])
    assert refused > 50 and read > 50, (refused, read)
