"""Saved sharded buffers on eight devices, in a process of their own."""

from tests.support.sharded import run


def test_eight_devices() -> None:
    cases = "(draws_the_same and batch and 2) or (on_the_host and Compressed and True) or Consume or 64_bits or planned"
    more = "(without_lanes and Prioritized and 4) or (new_transform and 4) or (mixtures and Host)"
    run("tests/more/sharded/eight_devices_saved.py", f"{cases} or {more}")
