import gc

import pytest

import fbuf
from tests.contracts import test_ownership as quick
from tests.contracts import test_ownership_more as further
from tests.contracts.test_ownership import gate, nothing_left  # noqa: F401
from tests.support.ownership import agree, filled, make
from tests.support.tables import one_of, select_tests
from tests.support.threads import Thread

pytestmark = pytest.mark.exhaustive


def test_opening_and_dropping_in_threads():
    buffer = make("host")

    def work(first):
        for i in range(20):
            assert agree(buffer.rows(filled(buffer, first + i)))[0] == first + i

    for thread in [Thread(work, 1000 * i) for i in range(3)]:
        thread.ends()
    gc.collect()
    assert fbuf.stores() == []


storage = one_of("host", "memmap")
globals().update(select_tests(quick, "storage"), **select_tests(further, "storage"))
