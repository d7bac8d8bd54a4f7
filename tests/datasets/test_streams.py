"""Data sets from streams, by several threads, and after interruptions."""

import weakref

import numpy as np
import pytest

import fbuf
from fbuf._formats import dataset as _dataset
from fbuf.datasets import _lock
from tests.datasets.test_from_arrays import ROW, bad, files, flat, made
from tests.support import datasets_oracle as oracle
from tests.support.refusals import raises


def test_streams_whose_rows_change_are_refused(tmp_path):
    data = bad()
    half = data["observations"].astype(np.float16)
    for other, words in (
        (data | {"observations": half}, r"from row 19 on leaf 'obs' is float16\[3\]"),
        (bad(actions=None), "leaf 'action' is missing"),
        (3, "data gives a int"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            fbuf.datasets.from_arrays(iter([data, other]), path=tmp_path / "a", piece_rows=4)
        assert files(tmp_path) == []
    raises(ValueError, "there are no rows", lambda: fbuf.datasets.from_arrays(iter([]), path=tmp_path / "a"))

    fails = (data if i == 0 else 1 / 0 for i in range(2))
    raises(ZeroDivisionError, None, fbuf.datasets.from_arrays, fails, path=tmp_path / "a", piece_rows=4)
    assert files(tmp_path) == []
    empty = {n: x[:0] for n, x in data.items()}
    buffer, _ = fbuf.datasets.from_arrays(iter([empty, data, empty, data, empty]), path=tmp_path / "a", view=ROW)
    assert buffer.capacity == 38


def test_a_stream_is_read_once_and_released(tmp_path):
    alive = []

    class Watched(np.ndarray):
        pass

    def blocks():
        for i in range(30):
            obs = np.zeros((5, 3), np.float32).view(Watched)
            alive.append(weakref.ref(obs))
            assert sum(ref() is not None for ref in alive) <= 2
            yield {"observations": obs, "rewards": np.full(5, i, np.float32), "terminals": np.arange(5) == 4}
            del obs

    buffer, _ = fbuf.datasets.from_arrays(blocks(), path=tmp_path / "a", piece_rows=20)
    assert buffer.capacity == 150

    def refilled():
        reward = np.zeros(5, np.float32)
        for i in range(30):
            reward[:] = i
            yield {"rewards": reward, "terminals": np.arange(5) == 4}

    fbuf.datasets.from_arrays(refilled(), path=tmp_path / "b", piece_rows=20)
    with _dataset.DataSet.open(tmp_path / "b") as dataset:
        assert dataset.read_rows(0, 150)["reward"].tolist() == np.repeat(np.arange(30), 5).tolist()


def test_interrupted_work_is_resumed(tmp_path):
    data, path = flat(made(), following=True), tmp_path / "a"

    def stop(done, total):
        if done >= 12:
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, fbuf.datasets.from_arrays, data, path=path, piece_rows=4, progress=stop)
    assert sorted(_dataset.committed(path)) == [0, 1]
    pytest.raises(FileNotFoundError, fbuf.datasets.open, path).match("not finished")
    other = data | {"rewards": data["rewards"] + (np.arange(19) == 1).astype(np.float32)}
    for wrong, settings in ((other, {}), (data, {"piece_rows": 5}), (data, {"codec": {"obs": fbuf.storages.Zstd()}})):
        settings = {"path": path, "piece_rows": 4} | settings
        raises(FileExistsError, "segments of other rows or settings", fbuf.datasets.from_arrays, wrong, **settings)
    settings, seen = {"path": path, "piece_rows": 4}, []
    raises(FileExistsError, "a stream, which cannot be", fbuf.datasets.from_arrays, iter([data]), **settings)
    fbuf.datasets.from_arrays(data, view=ROW, progress=lambda *at: seen.append(at), **settings)
    assert seen[0] == (8, 19) and seen[-1] == (19, 19)
    oracle.check_files(path, oracle.rows_of(made()))


def test_one_writer_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock.exclusive.__wrapped__, "__defaults__", (0.1,))
    with _lock.exclusive("another", tmp_path / "a"):
        for data in (bad(), iter([bad()])):
            raises(BlockingIOError, "the data set at", fbuf.datasets.from_arrays, data, path=tmp_path / "a")
    assert files(tmp_path / "a") == []
    fbuf.datasets.from_arrays(bad(), path=tmp_path / "a", view=ROW)
    assert "lock" not in files(tmp_path / "a")
