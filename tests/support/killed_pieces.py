"""A process that is killed while it makes a data set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fbuf._formats import dataset
from tests.support import pieces
from tests.support.paths import ROOT

PROGRAM = """
import os, sys
from pathlib import Path
from fbuf._formats import checkpoint as _files
from tests.support import pieces

calls = 0

def dying(name):
    was = getattr(_files.Disk, name)
    def call(self, *args):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        return was(self, *args)
    return call

for name in ("open", "pwrite", "fsync", "rename", "close"):
    setattr(_files.Disk, name, dying(name))
pieces.make(Path(sys.argv[1]))
"""


def check_killed_at(path: Path, call: int) -> None:
    """A process killed at the given call of the disk leaves committed segments, and the rest can be written."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, str(path), str(call)]
    assert subprocess.run(command, env=environment, cwd=ROOT).returncode == -9
    there = dataset.committed(path)
    with pytest.raises(FileNotFoundError):
        dataset.DataSet.open(path)
    rng = np.random.default_rng(0)
    rows = {number: pieces.rows_of(rng, size) for number, size in pieces.SIZES.items()}
    for number in rows.keys() - there.keys():
        pieces.write(path, number, pieces.SCHEMA, rows[number])
    dataset.finish(path, pieces.USED)
    pieces.check(path, pieces.used_of(rows, pieces.USED), verify="full")
