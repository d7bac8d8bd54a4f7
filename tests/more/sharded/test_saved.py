"""Saved sharded buffers on eight devices, in a process of their own."""

from tests.support.sharded import run


def test_eight_devices() -> None:
    cases = "(draws_the_same and batch and 2) or (on_the_host and Compressed and True)"
    run(
        "tests/more/sharded/eight_devices_saved.py",
        f"{cases} or (without_lanes and Prioritized and 4) or Consume or 64_bits or new_transform or planned or mixtures",
    )
