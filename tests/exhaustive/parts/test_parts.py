"""The tests of parts with every buffer that has one."""

import pytest

from tests.more.parts.test_parts import test_is_in_place  # noqa: F401
from tests.parts.test_parts import (  # noqa: F401
    test_a_storage_of_rounded_rows,
    test_parts_are_saved_and_loaded,
    test_parts_work_in_jit_and_scan,
)
from tests.support.parts import BUFFERS

ON_THE_DEVICE = [name for name in BUFFERS if name not in ("codec", "storage, sampler, view")]


@pytest.fixture(params=ON_THE_DEVICE)
def name(request):
    return str(request.param)


@pytest.fixture(params=ON_THE_DEVICE)
def large(request):
    return str(request.param)


@pytest.fixture
def stored():
    return "storage with priorities, stacks"
