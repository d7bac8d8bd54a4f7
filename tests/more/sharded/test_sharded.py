"""Run the cases for eight devices."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tests.support.sharded import run


@pytest.mark.parametrize("optimized", [False, True])
def test_eight_devices(optimized: bool) -> None:
    run(ROOT / "tests/more/sharded/eight_devices.py", optimized)
