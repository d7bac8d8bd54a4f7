"""The tests of rows in files with both storages and other parts."""

from typing import Any

import pytest

from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.views import Row, Sequence
from tests.storages import test_memmap as quick
from tests.storages import test_memmap_more as further
from tests.support.memmap import TRANSITION
from tests.support.tables import one_of, select_tests

pytestmark = pytest.mark.exhaustive

PARTS: list[Any] = [(storage, TRANSITION, Prioritized(), 2) for storage in ("memmap", "files")]
PARTS += [("files", Sequence(3, autoreset="same_step"), Uniform(over="episodes"), 3), ("memmap", Row(), Epoch(), None)]
way = one_of(*((*parts, rows) for parts in PARTS for rows in (7, 12, 31)))
storage = one_of("files")
end = one_of("pass", "import os; os._exit(0)")
globals().update(select_tests(quick, "way", "storage"), **select_tests(further, "storage", "end"))
