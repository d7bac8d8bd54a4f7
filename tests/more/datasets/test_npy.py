"""The tests of gzipped .npy files with isal in place of the standard library's gzip."""

from isal import igzip

from fbuf.datasets._remote import _gzip
from tests.datasets.test_npy import (  # noqa: F401
    path,
    test_a_truncated_or_damaged_file_is_refused,
    test_arrays_read_as_written,
    test_bytes_after_the_array_are_refused,
    test_invalid_headers_are_refused,
    test_other_files_are_refused,
)


def test_isal_is_used_where_it_is_installed():
    assert _gzip() is igzip
