"""A sharded buffer over two processes: rows moved between processes, and kills at thirty instants."""

from pathlib import Path

import pytest

from tests.support.two_processes import check_killed, check_two_processes


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    check_two_processes("global", "Device", tmp_path)


@pytest.mark.parametrize("seed", range(2, 32))
def test_a_killed_save_leaves_the_one_before_or_its_own(seed: int, tmp_path: Path) -> None:
    check_killed(seed, tmp_path)
