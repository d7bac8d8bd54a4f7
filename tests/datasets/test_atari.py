"""`fbuf.datasets.atari_dqn`: rows converted from the public files, against the log of the player that wrote them."""

import itertools
import os
import pickle
import shutil
from unittest import mock

import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf._formats import dataset
from fbuf.datasets import _remote
from fbuf.datasets._atari import atari, plan, segment, workers
from fbuf.datasets._atari.segment import BEFORE
from fbuf.datasets._open import default_root
from fbuf.datasets._remote import FileCorrupted, SourceError, SpaceError
from fbuf.views import Row
from tests.support import atari_runs as made
from tests.support.atari_runs import FRAMES, RUN, get, same
from tests.support.fault_server import LISTING, FaultServer, Status
from tests.support.refusals import raises

run = made.run


@pytest.fixture
def files(run, tmp_path, monkeypatch):
    """A run of synthetic frames on the disk; a download that fails is tried again at once."""
    monkeypatch.setattr(_remote, "WAITS", (0.0, 0.0))
    made.write(tmp_path / "files", "Pong/1", run, level=1)
    return tmp_path / "files"


@pytest.fixture
def server(files):
    with FaultServer.of(files) as server:
        yield server


def file_of(files, kind, number):
    return made.file_of(files / RUN, kind, number)


@pytest.mark.more
def test_a_source_is_any_folder_above_the_files(files, run, tmp_path):
    for number, way in enumerate(["", "dqn", "dqn/Pong", "dqn/Pong/1/", RUN]):
        same(get(tmp_path / str(number), f"{files}/{way}", dumps=[1]), run, [1])


@pytest.mark.more
def test_the_public_bucket_is_read(files, run, tmp_path, monkeypatch):
    with FaultServer.of(files, listing="bucket") as server:
        monkeypatch.setattr(_remote, "BUCKET", server.base)
        monkeypatch.setattr(_remote, "LISTING", f"{server.base}/listing")
        rows = get(tmp_path, None)
        same(rows, run)
        meta = rows["meta"]
        assert (meta["id"], meta["game"], meta["run"], meta["selected"]) == ("Pong/1", "Pong", 1, None)
        assert meta["settings"]["sticky_actions"] == 0.25 and meta["source"] == server.base
        dump = meta["pieces"]["1"]
        assert (dump["capacity"], dump["add_count"], dump["stack"], dump["horizon"]) == (250, 499, 4, 1)
        file = dump["files"]["$store$_observation"]
        assert file["size"] == len(server.files[FRAMES.format(1)]) and len(file["md5"]) == 32
        server.faults[LISTING] = [Status(401)]
        raises(SourceError, "get: files of Pong/1 cannot be listed: .*source=", get, tmp_path, None, download="force")


def test_a_download_resumes_after_the_finished_segments(server, run, tmp_path):
    server.faults[FRAMES.format(2)] = [Status(404)]
    told = []
    raises(SourceError, "get: dump 2 of Pong/1: .*call again", get, tmp_path, server.base)
    assert sorted(dataset.committed(tmp_path / "Pong/1")) == [0, 1, BEFORE + 1]
    same(get(tmp_path, server.base, progress=lambda *at: told.append(at)), run)
    assert [server.asked.count(FRAMES.format(number)) for number in range(5)] == [1, 1, 2, 1, 1]
    assert told[-1][0] == told[-1][1] > 0
    assert sorted(os.listdir(tmp_path / "Pong/1")) == ["dataset.json", "pieces"]


@pytest.mark.more
def test_a_wrong_hash_is_reported_and_skipped_on_request(server, run, tmp_path):
    server.lies[FRAMES.format(1)] = {"md5": "0" * 32}
    raises(FileCorrupted, "dump 1 of Pong/1 is damaged: .*md5.*on_corrupt='skip'", get, tmp_path, server.base)
    with pytest.warns(UserWarning, match="dump 1 of Pong/1 is left out"):
        rows = get(tmp_path, server.base, on_corrupt="skip")
    same(rows, run, [0, 2, 3, 4])
    assert list(rows["meta"]["skipped"]) == ["1"]
    server.lies.clear()
    rows = get(tmp_path, server.base)  # tried again
    same(rows, run)
    assert not rows["meta"]["skipped"]


def test_an_error_of_the_progress_function_is_raised(files, tmp_path):
    settings = {"on_corrupt": "skip", "progress": mock.Mock(side_effect=ValueError("my own")), "workers": 0}
    raises(ValueError, "^my own$", get, tmp_path, files, dumps=[1], **settings)
    assert not dataset.committed(tmp_path / "Pong/1")


def test_nothing_is_left_of_a_damaged_segment(files, run, tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "MOST_BYTES", 1)
    monkeypatch.setattr(workers, "_BLOCK_ROWS", 100)
    path, file = tmp_path / "Pong" / "1", file_of(files, "$store$_observation", 1)
    data = file.read_bytes()
    file.write_bytes(data[:-8] + bytes(4) + data[-4:])  # the checksum at its end
    pytest.raises(FileCorrupted, get, tmp_path, files, dumps=[1]).match("dump 1 of Pong/1")
    assert dataset.committed(path) == {} and not list(path.glob("**/data*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "discard", lambda path, number: None)
        pytest.raises(FileCorrupted, get, tmp_path, files, dumps=[1]).match("dump 1 of Pong/1")
    assert dataset.committed(path)  # as if killed
    pytest.raises(FileNotFoundError, get, tmp_path, files, dumps=[1], download=False).match("not at")
    file.write_bytes(data)
    same(get(tmp_path, files, dumps=[1]), run, [1])
    assert len(dataset.committed(path)) == 4


def test_a_bomb_and_other_damaged_files_are_refused(files, tmp_path):
    harms = [made.cut_short, lambda file: made.lie(file, (250,), "<c16"), lambda file: made.lie(file, (100,), "<f4")]
    cases = [(made.KINDS[0], lambda file: made.bomb(file, (250, 84, 84)))]
    for kind, harm in cases + list(itertools.product(made.KINDS[1:], harms)):
        file = file_of(files, kind, 1)
        whole = file.read_bytes()
        harm(file)
        words = rf"get: dump 1 of Pong/1 is damaged: .*{kind[7:]}.*on_corrupt='skip'"
        raises(FileCorrupted, words, get, tmp_path, files, dumps=[1])
        assert not dataset.committed(tmp_path / "Pong" / "1")
        file.write_bytes(whole)


def test_a_segment_without_invalid_range_is_read(files, run, tmp_path):
    file_of(files, "invalid_range", 1).unlink()
    rows = get(tmp_path, files, dumps=[0, 1])
    same(rows, run, [0, 1])
    assert rows["meta"]["pieces"]["1"]["stack"] is None
    file_of(files, "add_count", 1).unlink()
    raises(FileCorrupted, "dump 1.*add_count_ckpt.1.gz is missing", get, tmp_path, files, download="force")


def test_finished_segments_are_not_downloaded_again(files, run, tmp_path):
    same(get(tmp_path, files, dumps=[0, 1]), run, [0, 1])
    save = dataset.committed(tmp_path / "Pong/1")[0].save
    same(get(tmp_path, "/nowhere", dumps=[0, 1]), run, [0, 1])
    same(get(tmp_path, "/nowhere", dumps=0, download=False), run, [0])
    same(get(tmp_path, files, dumps=range(1, 4)), run, [1, 2, 3])
    same(get(tmp_path, files), run)
    (tmp_path / "Pong/1/dataset.json").unlink()  # as if killed before the end
    same(get(tmp_path, files), run)
    same(get(tmp_path, "/nowhere", download=False), run)
    assert dataset.committed(tmp_path / "Pong/1")[0].save == save
    same(get(tmp_path, files, dumps=[0], download="force"), run, [0])
    assert dataset.committed(tmp_path / "Pong/1")[0].save != save


def test_missing_segments_are_named_when_nothing_is_downloaded(files, tmp_path):
    pytest.raises(FileNotFoundError, get, tmp_path, files, download=False).match("Pong/1 is not at .*download=True")
    assert not (tmp_path / "Pong").exists()
    get(tmp_path, files, dumps=[0])
    raises(FileNotFoundError, r"dumps \[3\] of Pong/1 are not at", get, tmp_path, files, dumps=[0, 3], download=False)


def test_a_download_that_never_begins_leaves_nothing(files, tmp_path, monkeypatch):
    raises(SourceError, "Pong/1 at .* has no dump 50; it has .0, 1, 2, 3, 4", get, tmp_path, files, dumps=[0, 50])
    other = shutil.copytree(files / RUN, tmp_path / "Breakout/1/replay_logs")
    for nowhere in (tmp_path, other, tmp_path / "nowhere"):
        raises(SourceError, "no file of Pong/1 is at.*that has dqn/Pong/1/replay_logs/ or", get, tmp_path, nowhere)
    with FaultServer({}, listing="") as server:
        raises(SourceError, "must list its folders, or have an index", get, tmp_path, server.base)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    raises(SpaceError, "Pong/1 needs .* GB on the disk of .* GB free; nothing was downloaded", get, tmp_path, files)
    assert not (tmp_path / "Pong").exists()


@pytest.mark.more
def test_rows_of_other_files_are_not_mixed_in(server, files, tmp_path):
    get(tmp_path, server.base, dumps=[0])
    other = made.record(made.synthetic(1000, seed=8), 250)
    made.write(files, "Pong/1", other, level=1)
    server.files = FaultServer.of(files, listing="").files
    pytest.raises(ValueError, lambda: get(tmp_path, server.base)).match("made from other files .*download='force'")
    same(get(tmp_path, server.base, download="force"), other)
    with dataset.SegmentWriter(tmp_path / "kind/Pong/1", 0, dataset.Schema({"t": ((), "int32")})) as dump:
        dump.append({"t": np.arange(3, dtype=np.int32)})
        dump.commit()
    pytest.raises(ValueError, lambda: get(tmp_path / "kind", files)).match("is of another kind")


def test_an_unknown_id_names_near_ones():
    for wrong, right in {"Pong/6": "Pong/1", "ms_pacman/2": "MsPacman/2", 7: "Pong/1"}.items():
        pytest.raises(ValueError, fbuf.datasets.atari_dqn, wrong).match(f"Near: .*{right}")


def test_invalid_options_are_refused_before_anything_is_downloaded(tmp_path):
    wrong = {
        "download": ["yes", 0, 1],  # 0 == False, and is not it
        "on_corrupt": ["ignore"],
        "workers": [-1, 1.5],
        "partial": [1],
        "verify": ["x"],
        "dumps": [[], ["0"], [-1], [True], [1.5], 0.5],
    }
    cases = [
        ({"view": Row}, "view is the class Row"),
        ({"prefetch": 1}, r"batch_size=256"),
        ({"codec": "zstd"}, "codec of 'obs' is 'zstd'"),
        ({"root": ""}, "atari_dqn: root is ''"),
        *(({n: x}, f"fbuf.datasets.atari_dqn: {n} .*expected") for n, values in wrong.items() for x in values),
    ]
    for option, words in cases:
        options = {"root": tmp_path, "source": tmp_path / "none", **option}
        raises((TypeError, ValueError), words, fbuf.datasets.atari_dqn, "Pong/1", **options)
    assert os.listdir(tmp_path) == []


def test_the_default_root_is_in_the_cache_folder(monkeypatch, tmp_path):
    for name in ("XDG_CACHE_HOME", "FBUF_DATASETS"):
        monkeypatch.delenv(name, raising=False)
    for name, below in (("HOME", ".cache/fbuf/datasets"), ("XDG_CACHE_HOME", "fbuf/datasets"), ("FBUF_DATASETS", "")):
        monkeypatch.setenv(name, str(tmp_path))
        assert default_root() == tmp_path / below


@pytest.mark.more
def test_a_locked_data_set_is_opened_and_not_written(files, tmp_path, monkeypatch):
    root = tmp_path / "root"

    def opened(**options):
        buffer, _ = fbuf.datasets.atari_dqn("Pong/1", root=root, source=files, workers=0, **options)
        assert buffer == pickle.loads(pickle.dumps(buffer))
        return buffer.capacity

    rows = opened()
    with atari.exclusive("a test", root / "Pong" / "1"):
        assert opened() == opened(download=False) == rows
        monkeypatch.setattr("fbuf.datasets._lock._PATIENCE", 0.0)
        for option in ({"dumps": [0, 1]}, {"download": "force"}):
            pytest.raises(BlockingIOError, opened, **option).match("in use by this process")
    fbuf.datasets.delete(root / "Pong" / "1")
    assert os.listdir(root / "Pong") == []


@pytest.mark.more
def test_a_data_set_written_again_by_another_process_is_opened_as_it_is_then(files, tmp_path):
    want = get(tmp_path, files)
    path, gone = tmp_path / "Pong" / "1", []
    whole = len(dataset.committed(path))

    def then():
        if not gone:
            gone.append(plan.discard(path, 0))
            raise FileNotFoundError
        return len(dataset.committed(path))

    assert atari.get(plan.Request("get", "Pong/1", path, files, workers=0), then) == whole
    again = get(tmp_path, files, download=False)
    assert all(np.array_equal(again[name], want[name]) for name in ("obs", "action", "truncated"))
