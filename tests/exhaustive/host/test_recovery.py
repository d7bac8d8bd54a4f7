"""Test stores in files after more kills and power failures, and every single damage."""

from pathlib import Path

import pytest

from fbuf._host.memory import file_arena
from tests.support.recovery import KINDS, check_damages, check_killed, check_power_failed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_a_killed_process_loses_no_row(kind: str, seed: int, tmp_path: Path) -> None:
    check_killed(kind, tmp_path / "store", 20, seed)


@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("first", range(8, 200, 16))
def test_flushed_rows_survive_a_power_failure(
    kind: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_arena.FileArena, "small", 8192)
    for seed in range(first, first + 16):
        check_power_failed(kind, seed, tmp_path / str(seed))


@pytest.mark.parametrize("kind", ["memmap", "files"])
@pytest.mark.parametrize("verify", [True, False], ids=["full", "lazy"])
def test_truncated_and_flipped_files_show_no_wrong_row(
    kind: str, verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_arena.FileArena, "small", 1024)
    check_damages(kind, verify, True, tmp_path)
