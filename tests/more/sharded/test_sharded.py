"""Run the cases for eight devices, some of them in each process."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT
from tests.support.sharded import run

GROUPS = ("probabilities", "every_anchor", "meshes or shard_map", "in_place")


@pytest.mark.parametrize("cases", [*GROUPS, f"not ({' or '.join(GROUPS)})"])
def test_eight_devices(cases: str) -> None:
    run(ROOT / "tests/more/sharded/eight_devices.py", cases)
