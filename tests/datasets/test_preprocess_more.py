"""Episodes of data sets and buffers that `preprocess` reads."""

import subprocess
import sys

import numpy as np
import pytest

import fbuf
from fbuf._formats import dataset as _dataset
from tests.support import datasets_oracle as oracle
from tests.support.paths import ROOT

pytestmark = pytest.mark.more


def test_ends_of_a_buffer_are_kept_where_rows_follow_each_other(tmp_path):
    row = {"obs": np.zeros(2, np.float32), "reward": np.float32(0), "terminated": False, "truncated": False}
    rows = {name: np.zeros((6, *np.shape(leaf)), np.asarray(leaf).dtype) for name, leaf in row.items()}
    rows["terminated"] = np.arange(6) % 3 == 2
    for name, writer in (("steps", fbuf.writers.Ring()), ("drawn", fbuf.writers.Reservoir())):
        ring = fbuf.Buffer(6, writer=writer)
        held = ring.extend(ring.init(row), rows)

        def less(row):
            return {"obs": row["obs"], "reward": row["reward"]}

        buffer, state = fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / name)
        after = buffer.rows(state).data
        if name == "steps":
            assert np.array_equal(after["terminated"], rows["terminated"])
            assert buffer.view == fbuf.views.Transition(action=None, autoreset="same_step")
        else:
            assert sorted(after) == ["obs", "reward"] and buffer.view == fbuf.views.Row()
            other, _ = fbuf.datasets.preprocess((ring, held), lambda row: row, dest=tmp_path / "all")
            assert other.view == fbuf.views.Row()
            fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / "kept", keep=("terminated",))


N = 3000
ROWS = np.arange(N * 300, dtype=np.float32).reshape(N, 300)


def from_arrays(folder, path, progress):
    data = {"observations": ROWS, "terminated": np.arange(N) % 7 == 0}
    oracle.from_arrays(data, path=path, piece_rows=100, workers=2, view=fbuf.views.Row(), progress=progress)


def preprocess(folder, path, progress):
    def same(row):
        return {"obs": row["obs"] + 0}

    if not (folder / "source").exists():
        oracle.from_arrays({"obs": ROWS}, path=folder / "source", episode_end=(), piece_rows=700)
    settings = {"piece_rows": 100, "batch_size": 25, "workers": 2, "progress": progress}
    fbuf.datasets.preprocess(folder / "source", same, dest=path, **settings)


def tell(done, total):
    print(done, flush=True)
    sys.stdin.readline()  # the test says when to go on


PROGRAM = """
import sys
from pathlib import Path
from tests.datasets import test_preprocess_more as module
folder = Path(sys.argv[2])
getattr(module, sys.argv[1])(folder, folder / "made", module.tell)
"""


@pytest.mark.parametrize("write", [from_arrays, preprocess])
def test_killed_work_is_resumed(write, tmp_path):
    path = tmp_path / "made"
    for wait in (400, 1700):
        command = [sys.executable, "-c", PROGRAM, write.__name__, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, bufsize=1, cwd=ROOT, **pipes) as process:
            while int(process.stdout.readline()) < wait:
                process.stdin.write("on\n")
            process.kill()
        pytest.raises(FileNotFoundError, fbuf.datasets.open, path).match("not finished")
    done = sum(piece.rows for piece in _dataset.committed(path).values())
    assert done >= 1000
    seen = []
    write(tmp_path, path, lambda now, total: seen.append(now))
    assert seen[0] == done
    with _dataset.DataSet.open(path) as dataset:
        assert np.array_equal(dataset.read_rows(0, N)["obs"], ROWS)
