"""Saved sharded buffers on eight devices: the costlier cases, in processes of their own."""

import pytest

from tests.support.sharded import run


@pytest.mark.parametrize(
    "cases",
    ["draws_the_same", "without_lanes", "on_the_host or drawn_stay or shared_blocks or new_transform or mixtures"],
)
def test_eight_devices(cases: str) -> None:
    run("tests/more/sharded/eight_devices_saved.py", cases)
