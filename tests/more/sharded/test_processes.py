"""A sharded buffer over two processes of four devices each."""

from pathlib import Path

from tests.support.two_processes import check_killed, check_two_processes


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    check_two_processes("local", "Host", tmp_path)


def test_a_killed_save_leaves_the_one_before_or_its_own(tmp_path: Path) -> None:
    check_killed(1, tmp_path)
