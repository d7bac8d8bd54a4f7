import pytest

from tests.parts import test_parts as quick
from tests.parts.test_parts_more import test_is_in_place  # noqa: F401
from tests.support.parts import BUFFERS
from tests.support.tables import one_of, select_tests

pytestmark = pytest.mark.exhaustive

ON_THE_DEVICE = [name for name in BUFFERS if name not in ("codec", "storage, sampler, view")]
name = one_of(*ON_THE_DEVICE)
large = one_of(*ON_THE_DEVICE)
stored = one_of("storage with priorities, stacks")
globals().update(select_tests(quick, "name", "stored"))
