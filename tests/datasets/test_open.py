"""`fbuf.datasets`: opening, looking at, checking and removing data sets."""

import os
import shutil

import jax
import numpy as np
import pytest

import fbuf
from fbuf import datasets
from fbuf._formats import dataset as _dataset
from fbuf._host.types import StoreCorrupted
from fbuf.datasets import _minari
from tests.support import datasets_oracle as oracle
from tests.support import segments
from tests.support.disk import flip
from tests.support.refusals import raises


def test_info_describes_a_data_set(tmp_path):
    segments.make(tmp_path)
    info = datasets.info(tmp_path)
    assert info.finished and info.rows == 34 and info.unused == ()
    counts = {number: counts[:2] for number, counts in info.segments.items()}
    assert counts == {3: (11, 14), 0: (3, 3), 1: (12, 17), 2: (8, 8)}
    assert info.disk == sum(file.stat().st_size for file in tmp_path.rglob("data-*"))
    assert info.raw == 34 * (36 + 4 * 4 + 2) and info.ratio == info.raw / info.disk
    assert info.leaves["obs"] == "uint8[6, 6]" and info.meta == {"name": "made"}
    text = str(info)
    assert "34 in 4 segments" in text and "obs uint8[6, 6]" in text and "made" in text


def test_verify_names_the_damaged_segment(tmp_path):
    segments.make(tmp_path)
    datasets.verify(tmp_path)
    flip(*(tmp_path / "pieces" / "1").glob("data-*"), -3)
    raises(fbuf.StoreCorrupted, r"segment 1 of .* is damaged.*or remove .*pieces/1", datasets.verify, tmp_path)
    pytest.raises(fbuf.StoreCorrupted, datasets.open, tmp_path, verify="full").match("segment 1")
    pytest.raises(ValueError, datasets.open, tmp_path, verify="no").match('expected "full" or "lazy"')


@pytest.mark.more
def test_a_damaged_segment_is_written_again_as_the_error_says(tmp_path):
    def make():
        made = oracle.from_arrays({"t": np.arange(9)}, path=tmp_path / "a", episode_end=(), segment_rows=3)
        return np.asarray(made[0].rows(made[1]).data["t"])

    make()
    before = {n: (tmp_path / f"a/pieces/{n}").stat().st_mtime_ns for n in (0, 2)}
    file = next((tmp_path / "a/pieces/1").glob("*.safetensors"))
    for harm in (lambda: os.truncate(file, 9), file.unlink):
        harm()
        with pytest.raises(fbuf.StoreCorrupted) as told:
            fbuf.datasets.verify(tmp_path / "a")
        words = str(told.value).partition("or remove ")[2]
        folder, manifest = words.partition(", and write the data set again")[0].split(" and ")
        shutil.rmtree(folder)
        words = f"Restore its folder, or remove {manifest}, and write"
        raises(FileNotFoundError, words, fbuf.datasets.open, tmp_path / "a")
        os.unlink(manifest)
        assert make().tolist() == list(range(9))
    assert before == {n: (tmp_path / f"a/pieces/{n}").stat().st_mtime_ns for n in (0, 2)}


def test_a_damaged_frame_is_an_error_of_the_batch(tmp_path):
    rows = segments.make(tmp_path)
    with _dataset.DataSet.open(tmp_path) as dataset:
        offset = int(dataset.store._columns[0].address[0]) & (1 << 40) - 1
    flip(*(tmp_path / "pieces" / "3").glob("data-*"), offset + 3)
    buffer, state = datasets.open(tmp_path)
    got = buffer.get(state, np.arange(20, 34, dtype=np.int32))
    np.testing.assert_array_equal(got.data["obs"], rows["obs"][20:])
    with pytest.raises(Exception, match="checksum"):
        jax.block_until_ready(buffer.get(state, np.arange(20, 34, dtype=np.int32) * 0))
    assert isinstance(fbuf.stores()[-1]._store.last_error, fbuf.StoreCorrupted)


def test_delete_removes_only_a_closed_data_set(tmp_path):
    path = tmp_path / "set"
    pytest.raises(FileNotFoundError, datasets.delete, path).match("nothing was removed")
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    pytest.raises(FileNotFoundError, datasets.delete, path).match("nothing was removed")
    segments.make(path)
    buffer, state = datasets.open(path)
    pytest.raises(BlockingIOError, datasets.delete, path).match("is open in this process")
    jax.block_until_ready(state)
    del state
    datasets.delete(path)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]
    pytest.raises(FileNotFoundError, datasets.delete, path)
    (path / "notes.txt").unlink()
    segments.make(path)
    (path / "dataset.json").write_bytes(b"damaged")
    datasets.delete(path)
    assert not path.exists()


def test_leaf_names_without_a_structure_are_refused(tmp_path):
    cases = [(["a", "b"], ["a", "a"]), (["a", "1"], ["a", 1]), (["a", "b"], ["x", "y"]), (["a", "a/b"], None)]
    for number, (names, keys) in enumerate(cases):
        structure = keys and {"dict": [[key, at] for at, key in enumerate(keys)]}
        path, schema = tmp_path / str(number), _dataset.Schema({n: ((), "int32") for n in names}, structure)
        segments.write(path, 0, schema, dict.fromkeys(names, np.arange(3, dtype=np.int32)))
        _dataset.finish(path, [_dataset.SegmentRows(0)])
        pytest.raises(StoreCorrupted, fbuf.datasets.open, path).match("leaves a, .* do not fit")


def test_missing_data_sets_and_names_that_lead_elsewhere_are_refused(tmp_path):
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    for name in ("a/../../b", "a//b", "a\\b"):
        raises(ValueError, "has an invalid name|expected a name", fbuf.datasets.minari, name, **where)
    pytest.raises(FileNotFoundError, fbuf.datasets.minari, "D4RL/door/human-v2", **where).match("Pass download=True")
    where = {"root": tmp_path / "ours"}
    raises(FileNotFoundError, "expected data/metadata.json", fbuf.datasets.minari, tmp_path / "nothing", **where)
    raises(ValueError, "download is 'yes'", fbuf.datasets.minari, "D4RL/door/human-v2", download="yes", **where)
    assert list(tmp_path.iterdir()) == []


def test_segments_hold_whole_episodes():
    runs = _minari._whole_episodes([5, 1, 7, 2, 6], 6)
    assert [list(run) for run in runs] == [[0, 1], [2], [3, 4]]
    assert [list(run) for run in _minari._whole_episodes([5, 1, 7, 2], 6)] == [[0, 1], [2], [3]]
