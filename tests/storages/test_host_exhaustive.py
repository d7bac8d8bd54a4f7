"""The tests of buffers on the host with every storage and form of calling."""

import pytest

from fbuf.samplers import Prioritized
from tests.storages import test_host as quick
from tests.storages import test_host_more as further
from tests.storages.test_host_more import untied  # noqa: F401
from tests.support.tables import one_of, select_tests

pytestmark = pytest.mark.exhaustive

storage = one_of("host", "memmap")
form = one_of("eager", "jit", "donated")
calls = one_of("eager", "jit", "donated", "scan")
lanes = one_of(None, 3)
sampler = one_of(Prioritized())
globals().update(select_tests(quick, "storage"), **select_tests(further, "storage", "sampler"))
