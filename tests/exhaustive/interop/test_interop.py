"""Further cases: see `tests/more/interop/test_interop.py`."""

from typing import Any

import pytest

from tests.more.interop.test_interop import (
    MEMORY,  # noqa: F401
    test_a_storage_filled_by_an_import_keeps_every_row_or_raises,  # noqa: F401
)
from tests.support.processes import run_python


def test_memory_stays_bounded(tmp_path):
    more, kept = map(int, run_python(MEMORY, tmp_path).stdout.split()[-2:])
    assert more < 100 + kept, (more, kept)


@pytest.fixture(params=["refuse"])
def on_full(request: pytest.FixtureRequest) -> Any:
    return request.param
