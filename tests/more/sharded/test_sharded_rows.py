"""Rows, statistics and mixtures of sharded buffers on eight devices, in a process of their own."""

from __future__ import annotations

from tests.support.sharded import run

CASES = (
    "(one_buffer and local) or (written_back and global) or inside or (all_rows and local) or whole or (0.25 and 0.75) or "
    "fractions_belong or windows_summaries"
)


def test_rows_and_mixtures_on_eight_devices() -> None:
    run("tests/more/sharded/eight_devices_rows.py", CASES, "tests/more/sharded/eight_devices_mixture.py")
