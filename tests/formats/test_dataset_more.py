"""A data set whose making ends at any call of the disk: see `tests/formats/test_dataset.py`."""

import itertools

import numpy as np
import pytest

from fbuf._formats import dataset
from fbuf._formats.checkpoint import Disk, data_file
from tests.support import pieces
from tests.support.memory_disk import Killed

pytestmark = pytest.mark.more


def killed_at(path, call):
    """Make a data set; from the given call on, the disk does nothing but close files, as a killed process does."""
    calls = itertools.count(1)

    def dying(name):
        real = getattr(Disk(), name)

        def run(_, *args):
            if next(calls) >= call:
                raise Killed
            return real(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "_WRITE_BLOCKS", 1)
        for name in ("open", "pwritev", "fsync", "rename", "unlink"):
            patch.setattr(Disk, name, dying(name))
        try:
            pieces.make(path)
        except Killed:
            return True
    return False


def test_a_killed_process_leaves_whole_segments(tmp_path):
    rng = np.random.default_rng(0)
    rows = {number: pieces.rows_of(rng, size) for number, size in pieces.SIZES.items()}
    for call in range(1, 1000):
        path = tmp_path / str(call)
        path.mkdir()
        if not killed_at(path, call):
            break
        there = dataset.committed(path)
        pytest.raises(FileNotFoundError, dataset.DataSet.open, path)
        for number in rows.keys() - there.keys():
            pieces.write(path, number, pieces.SCHEMA, rows[number])
        dataset.finish(path, pieces.USED)
        pieces.check(path, pieces.used_of(rows, pieces.USED), verify="full")
    assert call > 60
