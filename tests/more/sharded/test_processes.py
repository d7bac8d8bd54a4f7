"""A sharded buffer over two processes of four devices each."""

from pathlib import Path

import numpy as np

import fbuf
from tests.support.trees import same
from tests.support.two_processes import run_processes


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_processes("everything(sys.argv[4])", folder, processes=processes)
        with np.load(folder / "found.npz") as arrays:
            found.append([arrays[name] for name in arrays])
    same(found[0], found[1])
    (_, one), (_, two) = (fbuf.load(tmp_path / name / "saved") for name in "12")
    same(one.rows, two.rows)
