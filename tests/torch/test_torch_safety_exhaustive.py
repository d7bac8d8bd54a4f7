"""The other storages, with and without prefetch: see `tests/torch/test_torch_safety.py`."""

import pytest

from tests.support.tables import one_of, select_tests

pytest.importorskip("torch")

from tests.torch import test_torch_safety as quick  # noqa: E402
from tests.torch import test_torch_safety_more as further  # noqa: E402

pytestmark = pytest.mark.exhaustive

case = one_of(*[(name, prefetch) for name in quick.STORAGES for prefetch in (0, 1)])
globals().update(select_tests(quick, "case"), **select_tests(further, "case"))
