"""Further cases of data sets on disk: see `tests/formats/test_dataset.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.killed_pieces import check_killed_at


@pytest.mark.parametrize("call", [1, 3, 20, 39, 41, 60, 80])
def test_a_killed_process_leaves_whole_segments(tmp_path: Path, call: int) -> None:
    check_killed_at(tmp_path, call)
