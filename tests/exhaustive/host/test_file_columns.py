"""Test writes to files that fail at each call, with larger batches."""

from pathlib import Path

import pytest

from tests.support.disk_faults import check_failing_writes


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", ["noise", "still"])
def test_a_failed_write_leaves_the_store_unchanged(
    rows: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_failing_writes(rows, seed, 40, tmp_path, monkeypatch)
