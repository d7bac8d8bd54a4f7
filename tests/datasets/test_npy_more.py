"""The tests of gzipped .npy files with isal in place of the standard library's gzip."""

import pytest
from isal import igzip

from fbuf.datasets._remote import _gzip
from tests.datasets import test_npy as with_gzip
from tests.datasets.test_npy import path  # noqa: F401
from tests.support.tables import select_tests

pytestmark = pytest.mark.more

globals().update(select_tests(with_gzip, "path"))


def test_isal_is_used_where_it_is_installed():
    assert _gzip() is igzip
