"""`fbuf.datasets.atari_dqn`: games that were played, through files and servers, against the log of the player."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf import _pieces
from fbuf.datasets import _atari_download, _atari_names, _atari_plan, _atari_volumes, _atari_workers
from fbuf.datasets._atari_volumes import BEFORE
from fbuf.datasets._source import FileCorrupted, SourceError, SpaceError
from fbuf.datasets._source import files as source_files
from fbuf.views import Row, Transition
from tests.support import atari_pieces as made
from tests.support.fault_server import LISTING, Cut, FaultServer, Status

GAMES = {"Pong": (900, 250), "Breakout": (900, 250), "Freeway": (600, 170)}  # steps, and rows of a piece
RUN = "dqn/Pong/1/replay_logs/"
FRAMES = RUN + "$store$_observation_ckpt.{}.gz"


@pytest.fixture(scope="module")
def run() -> made.Run:
    return made.record(made.synthetic(1000, episode=30), 250)


@pytest.fixture
def files(run: made.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of frames that were drawn, on the disk; a download that fails is tried again at once."""
    monkeypatch.setattr(source_files, "WAITS", (0.0, 0.0))
    made.write(tmp_path / "files", "Pong/1", run, level=1)
    return tmp_path / "files"


@pytest.fixture
def server(files: Path) -> Iterator[FaultServer]:
    with FaultServer.of(files) as server:
        yield server


def file_of(files: Path, kind: str, number: int) -> Path:
    return made.file_of(files / RUN, kind, number)


def get(root: Path, source: Any, **options: Any) -> dict[str, np.ndarray]:
    """All rows of Pong/1, as numpy, without a buffer."""
    path = root / "Pong" / "1"
    options["pieces"] = _atari_plan.selected("get", options.get("pieces"))
    ask = _atari_download.Request("get", "Pong/1", path, source, **{"workers": 0} | options)
    with _atari_download.get(ask, lambda: _pieces.DataSet.open(path)) as dataset:
        return {**dataset.read_rows(0, dataset.rows), "meta": dataset.meta}


def same(rows: dict[str, Any], run: made.Run, numbers: list[int] | None = None) -> None:
    """Rows are those of the log."""
    want, cut = run.expected(numbers)
    assert len(rows["obs"]) == len(want)
    np.testing.assert_array_equal(rows["obs"], run.log.obs[want])
    np.testing.assert_array_equal(rows["action"], run.log.action[want])
    np.testing.assert_array_equal(rows["reward"], run.log.reward[want])
    np.testing.assert_array_equal(rows["terminated"], run.log.terminal[want])
    np.testing.assert_array_equal(rows["truncated"], cut)
    dtypes = {name: str(rows[name].dtype) for name in ("obs", "action", "reward", "terminated", "truncated")}
    assert list(dtypes.values()) == ["uint8", "int32", "float32", "bool", "bool"]


@pytest.mark.parametrize("game", GAMES)
def test_games_row_by_row(tmp_path: Path, game: str) -> None:
    pytest.importorskip("ale_py")
    steps, capacity = GAMES[game]
    run = made.record(made.play(game, steps, seed=3, max_steps=140), capacity)
    made.write(tmp_path, "Pong/1", run, level=1)
    rows = get(tmp_path, tmp_path)
    same(rows, run)
    assert rows["meta"]["episodes"] == run.log.terminal.sum() > 3
    assert all(seam["joined"] for seam in rows["meta"]["seams"])


# -------------------------------------------------------------------------------------------------- where from


@pytest.mark.parametrize("way", ["", "dqn", "dqn/Pong", "dqn/Pong/1/", RUN])
def test_a_source_may_be_any_folder_above_the_files(files: Path, run: made.Run, tmp_path: Path, way: str) -> None:
    same(get(tmp_path, f"{files}/{way}", pieces=[1]), run, [1])


def test_the_public_bucket(files: Path, run: made.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultServer.of(files, listing="bucket") as server:
        monkeypatch.setattr(source_files, "BUCKET", server.base)
        monkeypatch.setattr(source_files, "LISTING", f"{server.base}/listing")
        rows = get(tmp_path, None)
        same(rows, run)
        meta = rows["meta"]
        assert (meta["id"], meta["game"], meta["run"], meta["selected"]) == ("Pong/1", "Pong", 1, None)
        assert meta["settings"]["sticky_actions"] == 0.25 and meta["source"] == server.base
        piece = meta["pieces"]["1"]
        assert (piece["capacity"], piece["add_count"], piece["stack"], piece["horizon"]) == (250, 499, 4, 1)
        file = piece["files"]["$store$_observation"]
        assert file["size"] == len(server.files[FRAMES.format(1)]) and len(file["md5"]) == 32
        server.faults[LISTING] = [Status(401)]
        with pytest.raises(SourceError, match="get: the files of Pong/1 cannot be listed: .*401.*source='https://"):
            get(tmp_path, None, download="force")


def test_processes_and_faults_of_a_server(server: FaultServer, run: made.Run, tmp_path: Path) -> None:
    """Finished pieces are not downloaded again, files that were cut off are."""
    server.faults[FRAMES.format(2)] = [Status(404)]
    told: list[tuple[int, int]] = []
    with pytest.raises(SourceError, match="get: piece 2 of Pong/1: .*not found. Finished pieces stay at .*call again"):
        get(tmp_path, server.base)
    assert sorted(_pieces.committed(tmp_path / "Pong/1")) == [0, 1, BEFORE + 1]
    server.faults[FRAMES.format(4)] = [Cut(1000)]
    same(get(tmp_path, server.base, workers=2, progress=lambda *at: told.append(at)), run)
    asked = [server.asked.count(FRAMES.format(number)) for number in range(5)]
    assert asked == [1, 1, 2, 1, 2]
    assert told[-1][0] == told[-1][1] > 0
    assert sorted(os.listdir(tmp_path / "Pong/1")) == ["dataset.json", "pieces"]


def test_a_wrong_hash_is_told_and_left_out_on_request(server: FaultServer, run: made.Run, tmp_path: Path) -> None:
    server.lies[FRAMES.format(1)] = {"md5": "0" * 32}
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1 is damaged: .*md5.*on_corrupt='skip'"):
        get(tmp_path, server.base)
    with pytest.warns(UserWarning, match="piece 1 of Pong/1 is left out"):
        rows = get(tmp_path, server.base, on_corrupt="skip")
    same(rows, run, [0, 2, 3, 4])
    assert list(rows["meta"]["skipped"]) == ["1"]
    server.lies.clear()
    rows = get(tmp_path, server.base)  # tried again
    same(rows, run)
    assert not rows["meta"]["skipped"]


# ----------------------------------------------------------------------------------------------- damaged pieces

HARMS = {
    "cut short": made.cut_short,
    "some bits": made.damage,
    "a header of other frames": lambda file: made.lie(file, (250, 42, 168)),
    "fewer rows": lambda file: made.lie(file, (249, 84, 84)),
    "a bomb": lambda file: made.bomb(file, (250, 84, 84)),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_piece_is_named(files: Path, run: made.Run, tmp_path: Path, harm: str) -> None:
    HARMS[harm](file_of(files, "$store$_observation", 1))
    with pytest.raises(FileCorrupted, match=r"get: piece 1 of Pong/1 is damaged: .*ckpt.1.gz.*on_corrupt='skip'"):
        get(tmp_path, files)
    assert BEFORE + 1 not in _pieces.committed(tmp_path / "Pong" / "1")
    with pytest.warns(UserWarning, match="piece 1 of Pong/1 is left out"):
        rows = get(tmp_path, files, on_corrupt="skip")
    same(rows, run, [0, 2, 3, 4])
    made.write(files, "Pong/1", run, [1], level=1)
    same(get(tmp_path, files), run)


def test_nothing_is_left_of_a_piece_that_turns_out_to_be_damaged(files, run, tmp_path, monkeypatch) -> None:
    """What is committed early, where a piece takes much memory, goes; and what a killed process left of it, too."""
    monkeypatch.setattr(_atari_volumes, "MOST_BYTES", 1)
    monkeypatch.setattr(_atari_workers, "_BLOCK_ROWS", 100)
    path, file = tmp_path / "Pong" / "1", file_of(files, "$store$_observation", 1)
    data = file.read_bytes()
    file.write_bytes(data[:-8] + bytes(4) + data[-4:])  # the checksum at its end
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1"):
        get(tmp_path, files, pieces=[1])
    assert _pieces.committed(path) == {} and not list(path.glob("**/data*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pieces, "discard", lambda path, number: None)
        with pytest.raises(FileCorrupted, match="piece 1 of Pong/1"):
            get(tmp_path, files, pieces=[1])
    assert len(_pieces.committed(path)) == 1  # as if killed
    with pytest.raises(FileNotFoundError, match="not at"):
        get(tmp_path, files, pieces=[1], download=False)
    file.write_bytes(data)
    same(get(tmp_path, files, pieces=[1]), run, [1])
    assert len(_pieces.committed(path)) == 4


@pytest.mark.parametrize("kind", made.KINDS[1:])
def test_other_files_of_a_piece_are_checked_too(files: Path, tmp_path: Path, kind: str) -> None:
    file = file_of(files, kind, 1)
    whole = file.read_bytes()
    for harm in (
        made.cut_short,
        lambda file: made.lie(file, (250,), "<c16"),
        lambda file: made.lie(file, (100,), "<f4"),
    ):
        file.write_bytes(whole)
        harm(file)
        with pytest.raises(FileCorrupted, match="piece 1 of Pong/1 is damaged"):
            get(tmp_path, files, pieces=[1])


def test_a_piece_without_invalid_range_is_read(files: Path, run: made.Run, tmp_path: Path) -> None:
    """It says nothing that the counter does not; a copy may lack it."""
    file_of(files, "invalid_range", 1).unlink()
    rows = get(tmp_path, files, pieces=[0, 1])
    same(rows, run, [0, 1])
    told = rows["meta"]["pieces"]["1"]
    assert told["stack"] is None and "invalid_range" not in told["files"]
    file_of(files, "add_count", 1).unlink()
    with pytest.raises(FileCorrupted, match="piece 1.*add_count_ckpt.1.gz is missing"):
        get(tmp_path, files, download="force")


# --------------------------------------------------------------------------------------------------- selections


def test_pieces_that_are_there_are_not_asked_for_again(files, run, tmp_path):
    told = []
    same(get(tmp_path, files, pieces=[0, 1], progress=lambda done, total: told.append((done, total))), run, [0, 1])
    assert told[-1][0] == told[-1][1] > 0
    save = _pieces.committed(tmp_path / "Pong/1")[0].save
    same(get(tmp_path, "/nowhere", pieces=[0, 1]), run, [0, 1])
    same(get(tmp_path, "/nowhere", pieces=0, download=False), run, [0])
    same(get(tmp_path, files, pieces=range(1, 4)), run, [1, 2, 3])
    same(get(tmp_path, files), run)
    (tmp_path / "Pong/1/dataset.json").unlink()  # as if killed before the end
    same(get(tmp_path, files, workers=2), run)
    same(get(tmp_path, "/nowhere"), run)
    same(get(tmp_path, "/nowhere", download=False), run)
    assert _pieces.committed(tmp_path / "Pong/1")[0].save == save
    same(get(tmp_path, files, download="force"), run)
    assert _pieces.committed(tmp_path / "Pong/1")[0].save != save


def test_partial_episodes_can_be_left_out(files, run, tmp_path):
    rows = get(tmp_path, files, pieces=[0, 2], partial="drop")
    numbers = made.number_of(rows["obs"])
    gap = int(np.flatnonzero(np.diff(numbers) > 1)[0])
    assert run.log.terminal[numbers[gap + 1] - 1] and rows["truncated"][gap]
    assert len(get(tmp_path, files, pieces=[0, 2])["obs"]) > len(numbers)  # and are there again
    assert rows["meta"]["partial"] == "drop"


def test_without_a_download_what_is_missing_is_told(files, tmp_path):
    with pytest.raises(FileNotFoundError, match="Pong/1 is not at .*download=True"):
        get(tmp_path, files, download=False)
    assert not (tmp_path / "Pong").exists()
    get(tmp_path, files, pieces=[0])
    with pytest.raises(FileNotFoundError, match=r"pieces \[3\] of Pong/1 are not at"):
        get(tmp_path, files, pieces=[0, 3], download=False)


def test_a_piece_that_is_not_listed(files: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="Pong/1 has no piece 50 at .*; it has 0-4"):
        get(tmp_path, files, pieces=[0, 50])
    other = shutil.copytree(files / RUN, tmp_path / "Breakout/1/replay_logs")
    for nowhere in (tmp_path, other, tmp_path / "nowhere"):
        with pytest.raises(
            SourceError, match="no file of Pong/1 is at.*that holds dqn/Pong/1/replay_logs/ or Pong/1/rep"
        ):
            get(tmp_path, nowhere)
    with (
        FaultServer({}, listing="") as server,
        pytest.raises(SourceError, match="must list its folders, or have an index"),
    ):
        get(tmp_path, server.base)
    assert not (tmp_path / "Pong").exists()  # a download that never began leaves nothing


def test_other_files_than_before_are_not_mixed_in(server: FaultServer, files: Path, tmp_path: Path) -> None:
    get(tmp_path, server.base, pieces=[0])
    other = made.record(made.synthetic(1000, seed=8), 250)
    made.write(files, "Pong/1", other, level=1)
    server.files = FaultServer.of(files, listing="").files
    with pytest.raises(ValueError, match="made from other files .*download='force'"):
        get(tmp_path, server.base)
    same(get(tmp_path, server.base, download="force"), other)


def test_a_folder_with_something_else(tmp_path, files):
    path = tmp_path / "Pong" / "1"
    with _pieces.PieceWriter(path, 0, _pieces.Schema({"t": ((), "int32")})) as piece:
        piece.append({"t": np.arange(3, dtype=np.int32)})
        piece.commit()
    with pytest.raises(ValueError, match="a data set of another kind"):
        get(tmp_path, files)


def test_a_codec_stays_that_of_the_pieces(files, run, tmp_path):
    quick = fbuf.storages.Zstd(level=1, chunk=4, repack=False)
    same(get(tmp_path, files, pieces=[0], codec=quick), run, [0])
    assert _pieces.committed(tmp_path / "Pong/1")[0].schema["obs"].codec == quick
    same(get(tmp_path, files, pieces=[0, 1]), run, [0, 1])
    assert _pieces.committed(tmp_path / "Pong/1")[1].schema["obs"].codec == quick
    with pytest.raises(ValueError, match="download='force'"):
        get(tmp_path, files, codec=fbuf.storages.Zstd())


def test_the_disk_is_asked_first(files, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SpaceError, match="Pong/1 needs .* GB on the disk of .* GB free; nothing was downloaded"):
        get(tmp_path, files)
    assert not (tmp_path / "Pong").exists()


# --------------------------------------------------------------------------------------------------------- names


def test_all_runs_are_listed():
    ids = fbuf.datasets.available()
    assert len(ids) == len(set(ids)) == 300
    assert {"StarGunner/1", "Tennis/2", "Zaxxon/5", "Pong/1"} <= set(ids)  # torchrl's list ends before these
    assert list(_atari_names.GAMES) == sorted(_atari_names.GAMES) and len(_atari_names.GAMES) == 60


def test_a_wrong_id_names_near_ones():
    near = {
        "pong/1": "Pong/1",
        "Pong/6": "Pong/1",
        "MsPacmann/3": "MsPacman/3",
        "ms_pacman/2": "MsPacman/2",
        7: "Pong/1",
    }
    for wrong, right in near.items():
        with pytest.raises(ValueError, match=f"Near: .*{right}"):
            fbuf.datasets.atari_dqn(wrong)


def test_wrong_options(tmp_path):
    wrong = {
        "download": ["yes", 0, 1],  # 0 == False, and is not it
        "on_corrupt": ["ignore"],
        "workers": [-1, 1.5],
        "partial": [1],
        "verify": ["x"],
        "pieces": [[], ["0"], [-1], [True], [1.5], 0.5],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"fbuf.datasets.atari_dqn: {name} .*expected"):
                fbuf.datasets.atari_dqn("Pong/1", root=tmp_path, **{name: value})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("option", "kind", "words"),
    [
        ({"view": Transition(observation="pixels")}, ValueError, "observation is 'pixels', but rows have"),
        ({"view": Row}, TypeError, "view is the class Row"),
        ({"sampler": fbuf.samplers.Staleness(3, version="version")}, ValueError, "leaf 'version', but rows have"),
        ({"prefetch": 1}, ValueError, r"batch_size=256"),
        ({"codec": "zstd"}, TypeError, "codec of 'obs' is 'zstd'"),
        ({"root": 3}, TypeError, "atari_dqn: root is a int; expected the path of a folder, or None"),
        ({"root": ""}, TypeError, "atari_dqn: root is ''"),
    ],
)
def test_what_cannot_be_opened_is_told_before_anything_is_fetched(option, kind, words, tmp_path):
    with pytest.raises(kind, match=words):
        fbuf.datasets.atari_dqn("Pong/1", **{"root": tmp_path, "source": tmp_path / "none", **option})
    assert os.listdir(tmp_path) == []


def test_one_that_is_there_is_opened_by_many_at_a_time(files, tmp_path, monkeypatch):
    """Also where nobody can write: neither its lock nor any file of it is touched."""
    root = tmp_path / "root"

    def opened(**options: Any) -> int:
        return fbuf.datasets.atari_dqn("Pong/1", root=root, source=files, workers=0, **options)[0].capacity

    rows = opened()
    assert opened(prefetch=1, batch_size=2) == rows
    with _atari_download.held("a test", root / "Pong" / "1"):
        assert opened() == opened(download=False) == rows
        monkeypatch.setattr("fbuf.datasets._lock._PATIENCE", 0.0)
        for option in ({"pieces": [0, 1]}, {"download": "force"}):  # what would be written must wait
            with pytest.raises(BlockingIOError, match="in use by this process"):
                opened(**option)


def test_one_that_another_process_makes_anew_meanwhile_is_opened_as_it_is_then(files, tmp_path):
    want = get(tmp_path, files)
    path, calls = tmp_path / "Pong" / "1", []
    whole = len(_pieces.committed(path))

    def then() -> int:
        if not calls:
            _atari_plan.discard(path, 0)
            calls.append("gone")
            raise FileNotFoundError
        return len(_pieces.committed(path))

    assert _atari_download.get(_atari_download.Request("get", "Pong/1", path, files, workers=0), then) == whole
    again = get(tmp_path, files, download=False)
    assert all(np.array_equal(again[name], want[name]) for name in ("obs", "action", "truncated"))


def test_default_root(monkeypatch, tmp_path):
    from fbuf.datasets._root import default_root

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FBUF_DATASETS", raising=False)
    assert default_root() == tmp_path / ".cache" / "fbuf" / "datasets"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "fbuf" / "datasets"
    monkeypatch.setenv("FBUF_DATASETS", str(tmp_path / "here"))
    assert default_root() == tmp_path / "here"


def test_a_deleted_data_set_leaves_nothing(files, tmp_path):
    get(tmp_path, files, pieces=[0])
    fbuf.datasets.delete(tmp_path / "Pong" / "1")
    assert os.listdir(tmp_path / "Pong") == []
