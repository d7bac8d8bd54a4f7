"""Further cases of data sets on disk: see `tests/formats/test_dataset.py`."""

from __future__ import annotations

from pathlib import Path

from tests.support.killed_pieces import check_killed_at


def test_a_killed_process_leaves_whole_segments(tmp_path: Path) -> None:
    check_killed_at(tmp_path, 40)
