"""`fbuf.datasets.atari_dqn`: games that were played, through files, workers and views, against the log of the player."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf import _pieces
from fbuf.datasets import (
    _atari_get,
    _atari_job,
    _atari_names,
    _atari_plan,
    _atari_volumes,
    _boot,
    _worker,
    _workers,
)
from fbuf.datasets._atari_piece import schema
from fbuf.datasets._atari_volumes import BEFORE
from fbuf.datasets._source import Bucket, Entry, FileCorrupted, Folder, Retry, SourceError, SpaceError, connect
from fbuf.samplers import Epoch
from fbuf.views import Episode, Row, Sequence, Transition
from tests import _atari_pieces as made
from tests._fault_server import LISTING, Drop, FaultServer, Slow, Status

GAMES = {"Pong": (900, 250), "Breakout": (900, 250), "Freeway": (600, 170)}  # steps, and rows of a piece
LOST = 2  # the piece that is missing in the middle
QUICK = Retry(attempts=4, first=0.01, most=0.05, timeout=10)


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[made.Run, Path]]:
    """Real games, written as the public files are; of each a folder."""
    pytest.importorskip("ale_py")
    runs = {}
    for game, (steps, capacity) in GAMES.items():
        run = made.record(made.play(game, steps, seed=3, max_steps=140), capacity)
        root = tmp_path_factory.mktemp(game)
        made.write(root, f"{game}/1", run)
        runs[game] = run, root
    return runs


@pytest.fixture(scope="session")
def drawn_run() -> made.Run:
    return made.record(made.synthetic(1000, episode=30), 250)


@pytest.fixture
def files(drawn_run: made.Run, tmp_path: Path) -> Path:
    """A run of frames that were drawn, on the disk."""
    made.write(tmp_path / "files", "Pong/1", drawn_run, level=1)
    return tmp_path / "files"


def logs(files: Path) -> Path:
    return files / "dqn" / "Pong" / "1" / "replay_logs"


def listing(files: Path) -> dict[int, dict[str, Entry]]:
    folder = "dqn/Pong/1/replay_logs/"
    return _atari_job.by_piece(Folder(str(files)).files(folder), folder)


def get(root: Path, source: Any, **options: Any) -> dict[str, np.ndarray]:
    """All rows of Pong/1, as numpy, without a buffer."""
    with warnings.catch_warnings():
        path = root / "Pong" / "1"
        given = {
            "pieces": None,
            "download": True,
            "workers": 0,
            "progress": False,
            "codec": None,
            "on_corrupt": "raise",
        } | options
        given["pieces"] = _atari_plan.selected("get", given["pieces"])
        dataset = _atari_get.get("get", "Pong/1", path, source=source, then=lambda: _pieces.DataSet.open(path), **given)
        with dataset:
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


# ------------------------------------------------------------------------------------------------- through views


@dataclasses.dataclass
class Oracle:
    """What views must give, from the log, one row at a time."""

    rows: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        ends = self.rows["terminated"] | self.rows["truncated"]
        self.size = len(ends)
        starts = np.flatnonzero(np.concatenate([[True], ends[:-1]]))
        self.start = starts[np.searchsorted(starts, np.arange(self.size), side="right") - 1]
        stops = np.flatnonzero(ends)
        self.end = stops[np.searchsorted(stops, np.arange(self.size))]

    def stack(self, t: int, k: int) -> np.ndarray:
        frames = np.zeros((k, 84, 84), np.uint8)
        for i in range(k):
            if t - i >= self.start[t]:
                frames[k - 1 - i] = self.rows["obs"][t - i]
        return frames

    def transitions(self, k: int, n: int, gamma: float) -> dict[int, dict[str, Any]]:
        found = {}
        for t in range(self.size):
            end = self.end[t]
            inside = end < t + n
            over = inside and self.rows["terminated"][end]
            last = end if over else (end - 1 if inside else t + n - 1)
            if last < t:
                continue  # nothing is known of what came of it
            rewards = self.rows["reward"][t : last + 1]
            found[t] = {
                "obs": self.stack(t, k),
                "next_obs": self.stack(end if inside else t + n, k),
                "reward": np.float32(sum(np.float32(r) * gamma**i for i, r in enumerate(rewards))),
                "discount": np.float32(0 if over else gamma ** len(rewards)),
                "action": self.rows["action"][t],
            }
        return found

    def sequences(self, length: int) -> dict[int, dict[str, Any]]:
        starts = [t for t in range(self.size) if self.end[t] >= t + length - 1]
        return {t: {name: column[t : t + length] for name, column in self.rows.items()} for t in starts}

    def episodes(self) -> dict[int, dict[str, Any]]:
        starts = sorted(set(self.start.tolist()))
        return {t: {name: column[t : self.end[t] + 1] for name, column in self.rows.items()} for t in starts}


def oracle(run: made.Run, numbers: list[int]) -> Oracle:
    rows, cut = run.expected(numbers)
    columns = run.log.take(rows)
    return Oracle(
        {
            "obs": columns["obs"],
            "action": columns["action"],
            "reward": columns["reward"],
            "terminated": columns["terminal"].astype(bool),
            "truncated": cut,
        }
    )


def drawn(buffer: fbuf.Buffer, state: Any, batch_size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Every anchor once, in order: its row, and what is drawn there."""
    sample = jax.jit(lambda state, key: buffer.sample(state, key, batch_size))
    last = -1
    while True:
        state, batch = sample(state, jax.random.key(0))
        data = {name: np.asarray(leaf) for name, leaf in batch.data.items()}
        mask, slot = np.asarray(batch.mask), np.asarray(batch.index.slot)
        for i in np.flatnonzero(mask):
            if slot[i] <= last:  # the next epoch
                return
            last = int(slot[i])
            yield last, {name: leaf[i] for name, leaf in data.items()}
        if not mask.all():
            return


VIEWS = {
    "row": (Row(), lambda of: {t: {n: c[t] for n, c in of.rows.items()} for t in range(of.size)}),
    "transition": (Transition(stack=4, gamma=0.9), lambda of: of.transitions(4, 1, 0.9)),
    "n_step": (Transition(stack=4, n_step=3, gamma=0.9), lambda of: of.transitions(4, 3, 0.9)),
    "sequence": (Sequence(12), lambda of: of.sequences(12)),
    "episode": (Episode(200), lambda of: of.episodes()),
}


def compare(run: made.Run, numbers: list[int], root: Path, source: Any, name: str) -> None:
    view, expected = VIEWS[name]
    buffer, state = fbuf.datasets.atari_dqn(
        "Pong/1", root=root, source=source, pieces=numbers, workers=0, view=view, sampler=Epoch(shuffle=False)
    )
    want, seen = expected(oracle(run, numbers)), 0
    for (slot, data), row in zip(drawn(buffer, state, 7 if name == "episode" else 64), sorted(want), strict=True):
        assert slot == row  # the index is the row
        for field, value in want[row].items():
            got = data[field]
            if name == "episode":
                length = len(value)
                assert data["mask"].sum() == length and not got[length:].any()
                got = got[:length]
            if field in ("reward", "discount"):
                np.testing.assert_allclose(got, value, rtol=1e-5)
            else:
                np.testing.assert_array_equal(got, value)
        seen += 1
    assert seen == len(want) > 0


@pytest.fixture(scope="session")
def beside(played: dict[str, tuple[made.Run, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The games' files as those of Pong, each in a folder, so that one shape serves all."""
    found = {}
    for game, (_, root) in played.items():
        folder = tmp_path_factory.mktemp("beside") / "dqn" / "Pong" / "1"
        folder.parent.mkdir(parents=True)
        shutil.copytree(root / "dqn" / game / "1", folder)
        found[game] = folder.parents[2]
    return found


@pytest.mark.parametrize("name", ["transition"])
def test_a_game_through_a_view_row_by_row(played, beside, tmp_path, name):
    """Across pieces, at ends, at the cut where a piece is missing."""
    run = played["Breakout"][0]
    numbers = [piece.number for piece in run.pieces if piece.number != LOST]
    assert len(numbers) >= 3
    assert oracle(run, numbers).rows["truncated"].sum() == 2 and run.log.terminal.sum() > 3
    compare(run, numbers, tmp_path, beside["Breakout"], name)


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("whole", [True, False])
def test_games_through_all_views_row_by_row(played, beside, tmp_path, game, name, whole):
    run = played[game][0]
    compare(run, [p.number for p in run.pieces if whole or p.number != LOST], tmp_path, beside[game], name)


@pytest.mark.parametrize("game", GAMES)
def test_games_row_by_row(played, beside, tmp_path, game):
    run, _ = played[game]
    rows = get(tmp_path, beside[game])
    same(rows, run)
    assert rows["meta"]["episodes"] == run.log.terminal.sum()
    assert all(seam["joined"] for seam in rows["meta"]["seams"])


# -------------------------------------------------------------------------------------------------- where from


@pytest.mark.parametrize("way", ["folder", "file", "inner", "game", "run", "logs", "http", "bucket"])
def test_sources(files, drawn_run, tmp_path, way):
    with FaultServer.of(files) if way in ("http", "bucket") else contextlib.nullcontext() as server:
        source = {
            "folder": lambda: files,
            "file": lambda: files.as_uri(),
            "inner": lambda: files / "dqn",
            "game": lambda: files / "dqn" / "Pong",
            "run": lambda: f"{logs(files).parent}/",
            "logs": lambda: logs(files),
            "http": lambda: server.base,
            "bucket": lambda: server.base,
        }[way]()
        rows = get(tmp_path, source, workers=2 if way == "http" else 0)
        same(rows, drawn_run)
        assert not (tmp_path / "Pong" / "1" / "arrivals").exists()


def test_copies_in_deeper_folders_are_not_of_the_run(files, drawn_run, tmp_path):
    shutil.copytree(logs(files), logs(files) / "old")
    for file in (logs(files) / "old").iterdir():
        made.cut_short(file)
    same(get(tmp_path / "root", files), drawn_run)


def test_faults_of_a_server_are_overcome(files, drawn_run, tmp_path):
    name = "dqn/Pong/1/replay_logs/$store$_observation_ckpt.1.gz"
    with FaultServer.of(files) as server:
        server.fault(name, Drop(after=1000), Status(503), Drop(after=5000))
        rows = get(tmp_path, connect(server.base, retry=QUICK), workers=1)
        same(rows, drawn_run)
        assert server.sent(name) < (files / name).stat().st_size + 2**17


def test_a_wrong_hash_is_told_and_left_out_on_request(files, drawn_run, tmp_path):
    name = "dqn/Pong/1/replay_logs/$store$_observation_ckpt.1.gz"
    with FaultServer.of(files) as server:
        server.files[name].lies["md5Hash"] = "AAAAAAAAAAAAAAAAAAAAAA=="
        server.files[name].lies["crc32c"] = None
        source = connect(server.base, retry=QUICK)
        with pytest.raises(FileCorrupted, match="piece 1 of Pong/1 is damaged.*md5"):
            get(tmp_path, source)
        with pytest.warns(UserWarning, match="piece 1 of Pong/1 is left out"):
            rows = get(tmp_path, source, on_corrupt="skip")
        same(rows, drawn_run, [0, 2, 3, 4])
        assert list(rows["meta"]["skipped"]) == ["1"]
        server.files[name].lies.clear()
        rows = get(tmp_path, source)  # tried again
        same(rows, drawn_run)
        assert not rows["meta"]["skipped"]


# ----------------------------------------------------------------------------------------------- damaged pieces

HARMS = {
    "cut short": lambda file: made.cut_short(file),
    "some bits": lambda file: made.damage(file),
    "a header that lies of rows": lambda file: made.lie(file, (10**9, 84, 84)),
    "a header of other frames": lambda file: made.lie(file, (250, 42, 168)),
    "objects": lambda file: made.lie(file, (250, 84, 84), "|O"),
    "fewer rows": lambda file: made.lie(file, (249, 84, 84)),
    "a bomb": lambda file: made.bomb(file, (250, 84, 84)),
    "nothing": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_piece_is_named(files, drawn_run, tmp_path, harm):
    HARMS[harm](made.file_of(logs(files), "$store$_observation", 1))
    with pytest.raises(FileCorrupted, match="get: piece 1 of Pong/1 is damaged: .*on_corrupt='skip'"):
        get(tmp_path, files)
    assert BEFORE + 1 not in _pieces.committed(tmp_path / "Pong" / "1")
    with pytest.warns(UserWarning, match="piece 1 of Pong/1 is left out"):
        rows = get(tmp_path, files, on_corrupt="skip")
    same(rows, drawn_run, [0, 2, 3, 4])
    made.write(files, "Pong/1", drawn_run, [1], level=1)
    same(get(tmp_path, files), drawn_run)


def test_nothing_is_left_of_a_piece_that_turns_out_to_be_damaged(files, drawn_run, tmp_path, monkeypatch):
    """What is committed early, where a piece takes much memory, goes; and what a killed process left of it, too."""
    monkeypatch.setattr(_atari_volumes, "MOST_BYTES", 1)
    monkeypatch.setattr(_atari_job, "_BLOCK_ROWS", 100)
    path, file = tmp_path / "Pong" / "1", made.file_of(logs(files), "$store$_observation", 1)
    data = file.read_bytes()
    file.write_bytes(data[:-8] + bytes(4) + data[-4:])  # the checksum at its end
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1"):
        get(tmp_path, files, pieces=[1])
    assert _pieces.committed(path) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_atari_volumes._pieces, "discard", lambda path, number: None)
        with pytest.raises(FileCorrupted, match="piece 1 of Pong/1"):
            get(tmp_path, files, pieces=[1])
    assert len(_pieces.committed(path)) == 1  # as if killed
    with pytest.raises(FileNotFoundError, match="not at"):
        get(tmp_path, files, pieces=[1], download=False)
    file.write_bytes(data)
    same(get(tmp_path, files, pieces=[1]), drawn_run, [1])
    assert len(_pieces.committed(path)) == 4


@pytest.mark.parametrize("kind", made.KINDS[1:])
def test_other_files_of_a_piece_are_checked_too(files, drawn_run, tmp_path, kind):
    made.cut_short(made.file_of(logs(files), kind, 1), 0.7)
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1 is damaged"):
        get(tmp_path, files, pieces=[0, 1])
    made.write(files, "Pong/1", drawn_run, [1], level=1)
    made.lie(made.file_of(logs(files), kind, 1), (250,), "<c16")
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1 is damaged"):
        get(tmp_path, files, pieces=[0, 1])


def test_a_piece_without_invalid_range_is_read(files, drawn_run, tmp_path):
    """It says nothing that the counter does not; a copy may lack it."""
    made.file_of(logs(files), "invalid_range", 1).unlink()
    rows = get(tmp_path, files, workers=1)
    same(rows, drawn_run)
    told = rows["meta"]["pieces"]["1"]
    assert told["stack"] is None and "invalid_range" not in told["files"]
    made.file_of(logs(files), "add_count", 1).unlink()
    with pytest.raises(FileCorrupted, match="piece 1.*add_count_ckpt.1.gz is not there"):
        get(tmp_path, files, download="force")


def test_lengths_that_differ_are_damage(files, tmp_path):
    made.lie(made.file_of(logs(files), "$store$_reward", 1), (100,), "<f4")
    with pytest.raises(FileCorrupted, match="piece 1"):
        get(tmp_path, files, pieces=[1])


# --------------------------------------------------------------------------------------------------- selections


def test_pieces_that_are_there_are_not_asked_for_again(files, drawn_run, tmp_path):
    told = []
    same(
        get(tmp_path, files, pieces=[0, 1], progress=lambda done, total: told.append((done, total))), drawn_run, [0, 1]
    )
    assert told[-1][0] == told[-1][1] > 0
    save = _pieces.committed(tmp_path / "Pong/1")[0].save
    same(get(tmp_path, "/nowhere", pieces=[0, 1]), drawn_run, [0, 1])
    same(get(tmp_path, "/nowhere", pieces=0, download=False), drawn_run, [0])
    same(get(tmp_path, files, pieces=range(1, 4)), drawn_run, [1, 2, 3])
    same(get(tmp_path, files), drawn_run)
    same(get(tmp_path, "/nowhere"), drawn_run)
    same(get(tmp_path, "/nowhere", download=False), drawn_run)
    assert _pieces.committed(tmp_path / "Pong/1")[0].save == save
    same(get(tmp_path, files, download="force"), drawn_run)
    assert _pieces.committed(tmp_path / "Pong/1")[0].save != save


def test_partial_episodes_can_be_left_out(files, drawn_run, tmp_path):
    rows = get(tmp_path, files, pieces=[0, 2], partial="drop")
    numbers = made.number_of(rows["obs"])
    gap = int(np.flatnonzero(np.diff(numbers) > 1)[0])
    assert drawn_run.log.terminal[numbers[gap + 1] - 1] and rows["truncated"][gap]
    assert len(get(tmp_path, files, pieces=[0, 2])["obs"]) > len(numbers)  # and are there again
    assert rows["meta"]["partial"] == "drop"


def test_without_a_download_what_is_missing_is_told(files, tmp_path):
    with pytest.raises(FileNotFoundError, match="Pong/1 is not at .*download=True"):
        get(tmp_path, files, download=False)
    assert not (tmp_path / "Pong").exists()
    get(tmp_path, files, pieces=[0])
    with pytest.raises(FileNotFoundError, match=r"pieces \[3\] of Pong/1 are not at"):
        get(tmp_path, files, pieces=[0, 3], download=False)


def test_a_piece_that_is_not_listed(files, tmp_path):
    with pytest.raises(SourceError, match="Pong/1 has no piece 50 at .*; it has 0-4"):
        get(tmp_path, files, pieces=[0, 50])
    with pytest.raises(SourceError, match="no file of Pong/1 is at.*that holds dqn/Pong/1/replay_logs/ or Pong/1/rep"):
        get(tmp_path, tmp_path)
    other = shutil.copytree(logs(files), tmp_path / "Breakout/1/replay_logs")
    with pytest.raises(SourceError, match="no file of Pong/1 is at"):  # of another game, as its folder says
        get(tmp_path, other)
    with pytest.raises(
        SourceError, match="get: the files of Pong/1 cannot be listed: .*no such folder.*source='folder'"
    ):
        get(tmp_path, tmp_path / "nowhere")
    assert not (tmp_path / "Pong").exists()  # a download that never began leaves nothing


@pytest.mark.parametrize("code", [401, 404])
def test_a_bucket_that_is_closed_is_told_with_a_way_out(tmp_path, code):
    with FaultServer() as server:
        server.fault(LISTING, Status(code, times=9))
        with pytest.raises(
            SourceError, match=rf"get: the files of Pong/1 cannot be listed: .*{code}.*source='https://"
        ):
            get(tmp_path, Bucket(server.base, retry=QUICK))


@pytest.mark.parametrize("pieces", [[], ["0"], [-1], [True], [1.5], 0.5])
def test_selections_that_are_none(pieces):
    with pytest.raises((TypeError, ValueError), match="expected numbers of pieces"):
        _atari_plan.selected("atari_dqn", pieces)


def test_other_files_than_before_are_not_mixed_in(files, drawn_run, tmp_path):
    with FaultServer.of(files) as server:
        get(tmp_path, server.base, pieces=[0])
        other = made.record(made.synthetic(1000, seed=8), 250)
        made.write(files, "Pong/1", other, level=1)
        for path in files.rglob("*.gz"):
            server.replace(path.relative_to(files).as_posix(), path.read_bytes())
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


def test_a_codec_stays_that_of_the_pieces(files, drawn_run, tmp_path):
    quick = fbuf.storages.Zstd(level=1, chunk=4, repack=False)
    same(get(tmp_path, files, pieces=[0], codec=quick, workers=1), drawn_run, [0])
    assert _pieces.committed(tmp_path / "Pong/1")[0].schema["obs"].codec == quick
    same(get(tmp_path, files, pieces=[0, 1]), drawn_run, [0, 1])
    assert _pieces.committed(tmp_path / "Pong/1")[1].schema["obs"].codec == quick
    with pytest.raises(ValueError, match="download='force'"):
        get(tmp_path, files, codec=fbuf.storages.Zstd())


# ------------------------------------------------------------------------------------------------ the processes


def test_workers_know_no_jax_and_say_what_they_used(files, tmp_path):
    listed = listing(files)
    path = str(tmp_path / "set")
    jobs = [_atari_job.job_of(Folder(str(files)), path, n, listed[n], schema()) for n in listed]
    reports: list[dict[str, Any]] = []
    outcomes = list(_workers.work(jobs, 2, reports.append))
    assert sorted(outcome.job["number"] for outcome in outcomes) == sorted(listed)
    assert all(outcome.error is None for outcome in outcomes)
    assert sum(report["rows"] for report in reports) == 250 * len(listed)
    assert max(outcome.peak for outcome in outcomes) < 150 << 20  # JAX alone would need more
    code = (
        f"import json, runpy, sys; runpy.run_path({_boot.__file__!r})['prepare'](); import fbuf.datasets._worker; "
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in ('jax', 'jaxlib', 'torch')]))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == []


@pytest.mark.slow
def test_memory_of_a_worker_does_not_grow_with_the_piece(tmp_path):
    """100,000 frames, 706 MB; of a million it needs some 200 MB, most of it what becomes of them."""
    rows, block = 100_000, made.synthetic(2000)
    folder = tmp_path / "dqn" / "Pong" / "1" / "replay_logs"
    folder.mkdir(parents=True)
    run = made.record(block, 1500, final=False)
    for kind, array in made.arrays(run, run.pieces[0]).items():
        long = array.ndim > 0 and len(array) == 1500
        header = io.BytesIO()
        shape = (rows, *array.shape[1:]) if long else array.shape
        descr = np.lib.format.dtype_to_descr(array.dtype)
        np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
        said = {"add_count": np.array(rows - 1), "invalid_range": (rows - 2 + np.arange(5)) % rows}.get(kind, array)
        with gzip.open(made.file_of(folder, kind, 0), "wb", 1) as file:
            file.write(header.getvalue())
            for start in range(0, rows if long else 1, 1400):
                file.write(said[: min(1400, rows - start)].tobytes() if long else said.tobytes())
    listed = listing(tmp_path)
    job = _atari_job.job_of(Folder(str(tmp_path)), str(tmp_path / "set"), 0, listed[0], schema())
    (outcome,) = _workers.work([job], 1, lambda report: None)
    assert outcome.error is None and 0 < outcome.peak < 200 << 20


@pytest.mark.parametrize(
    "error",
    [
        FileCorrupted("it is", file="a", at=7),
        SourceError("not there"),
        SpaceError(errno.ENOSPC, "full"),
        OSError(errno.EACCES, "no", "/x"),
        ValueError("v"),
        MemoryError("m"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error):
    back = _workers.error_of(json.loads(json.dumps(_worker.said(error))))
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "errno", 0) == getattr(error, "errno", 0)
    assert getattr(back, "at", 0) == getattr(error, "at", 0)


def _cause(job: dict[str, Any]) -> BaseException | None:
    return next(iter(_workers.work([job], 1, lambda report: None))).error


def test_errors_of_workers_arrive_as_they_were(files, tmp_path):
    listed = listing(files)
    job = _atari_job.job_of(Folder(str(files)), str(tmp_path / "set"), 0, listed[0], schema())
    assert isinstance(_cause({**job, "number": "x"}), (TypeError, _workers.WorkerError))
    made.file_of(logs(files), "$store$_action", 0).unlink()
    assert isinstance(_cause(job), SourceError)
    (tmp_path / "set").write_text("a file")
    made.write(files, "Pong/1", made.record(made.synthetic(300), 250), [0], level=1)
    error = _cause(job)
    assert isinstance(error, OSError) and error.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_worker_that_is_killed_is_told_with_its_piece(files, drawn_run, tmp_path, monkeypatch):
    """By the system, for memory: the error names the piece, and the next call goes on."""
    popen = subprocess.Popen

    def killed(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        process.kill()
        return process

    monkeypatch.setattr(_workers.subprocess, "Popen", killed)
    with pytest.raises(_workers.WorkerError, match="piece 0 of Pong/1: its process was ended by signal 9"):
        get(tmp_path, files, workers=1)
    monkeypatch.undo()
    same(get(tmp_path, files, workers=1), drawn_run)


def test_an_interrupt_ends_the_workers(files, tmp_path):
    processes = []
    popen = subprocess.Popen
    with FaultServer.of(files) as server, pytest.MonkeyPatch.context() as patch:
        server.fault("dqn/Pong/1/replay_logs/$store$_observation_ckpt.0.gz", Slow(wait=5.0, block=10))

        def kept(*args: Any, **options: Any) -> Any:
            processes.append(popen(*args, **options))
            return processes[-1]

        def interrupt(done: int, total: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(_workers.subprocess, "Popen", kept)
        with pytest.raises(KeyboardInterrupt):
            get(tmp_path, server.base, workers=2, progress=interrupt)
    assert len(processes) == 2 and all(process.poll() is not None for process in processes)


PROGRAM = f"""
import runpy, sys
from pathlib import Path
runpy.run_path({_boot.__file__!r})["prepare"]()  # a second less than with JAX
from fbuf.datasets import _atari_get
_atari_get.get(
    "get", "Pong/1", Path(sys.argv[1], "Pong", "1"), source=sys.argv[2], pieces=None, download=True,
    workers=int(sys.argv[3]), progress=lambda done, total: print(done, flush=True), codec=None, on_corrupt="raise",
    then=lambda: None,
)
"""


def start(root: Path, source: str, workers: int = 2) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    arguments = [sys.executable, "-c", PROGRAM, str(root), source, str(workers)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=env)


def children(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def test_two_processes_at_once(files, drawn_run, tmp_path):
    name = "dqn/Pong/1/replay_logs/$store$_observation_ckpt.0.gz"
    with FaultServer.of(files) as server:
        server.fault(name, Slow(wait=0.2, block=1024))
        with start(tmp_path, server.base, 1) as first:
            assert first.stdout is not None and first.stdout.readline()
            with pytest.raises(BlockingIOError, match=f"in use by process {first.pid}"):
                get(tmp_path, files, pieces=[0])
            first.kill()
    same(get(tmp_path, files), drawn_run)


@pytest.mark.parametrize("moment", [pytest.param(m, marks=pytest.mark.slow if m else ()) for m in range(6)])
def test_kill_and_resume(files, drawn_run, tmp_path, moment):
    """Whatever was under way, the next call goes on with what is missing, and the rows are those of the log."""
    name = "dqn/Pong/1/replay_logs/$store$_observation_ckpt.{}.gz"
    size = (files / name.format(1)).stat().st_size
    with FaultServer.of(files) as server:
        if moment == 0:
            server.fault(name.format(1), Slow(wait=0.3, block=size // 4))  # killed while this one arrives
        with start(tmp_path, server.base) as process:
            assert process.stdout is not None
            if moment == 0:
                part = tmp_path / "Pong/1/arrivals/1" / (name.format(1).rpartition("/")[2] + ".part")
                wait(lambda: part.exists() and part.stat().st_size >= size // 4)
            else:
                process.stdout.readline()
                time.sleep(0.03 * moment)
            workers = children(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        wait(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers))  # they end with their parent
        assert workers or moment
        done = _pieces.committed(tmp_path / "Pong" / "1")
        before = {number: server.sent(name.format(number)) for number in range(5)}
        same(get(tmp_path, server.base, workers=1), drawn_run)
        if moment == 0:
            assert 1 not in done
            asked = [request for request in server.log if request.name == name.format(1)]
            assert len(asked) == 2 and asked[1].begin >= size // 4  # what had arrived was kept
        assert all(
            server.sent(name.format(n)) == before[n] for n in range(5) if n in done and (not n or BEFORE + n in done)
        )


def wait(until: Any, seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_the_disk_is_asked_first(files, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SpaceError, match="Pong/1 needs .* which has 1.0 kB free; nothing was begun"):
        get(tmp_path, files)
    assert not (tmp_path / "Pong").exists()


# --------------------------------------------------------------------------------------------------------- names


def test_all_runs_are_listed():
    ids = fbuf.datasets.available()
    assert len(ids) == len(set(ids)) == 300
    assert {"StarGunner/1", "Tennis/2", "Zaxxon/5", "Pong/1"} <= set(ids)  # torchrl's list ends before these
    assert list(_atari_names.GAMES) == sorted(_atari_names.GAMES) and len(_atari_names.GAMES) == 60


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("pong/1", "Pong/1"),
        ("Pong/6", "Pong/1"),
        ("MsPacmann/3", "MsPacman/3"),
        ("ms_pacman/2", "MsPacman/2"),
        ("Pong", "Pong/1"),
        (7, "Pong/1"),
    ],
)
def test_a_wrong_id_names_near_ones(wrong, near):
    with pytest.raises(ValueError, match=f"Near: .*{near}"):
        fbuf.datasets.atari_dqn(wrong)


@pytest.mark.parametrize(
    "option",
    [
        {"download": "yes"},
        {"download": 0},
        {"download": 1},
        {"on_corrupt": "ignore"},
        {"workers": -1},
        {"workers": 1.5},
        {"partial": 1},
        {"verify": "x"},
    ],
)
def test_wrong_options(option, tmp_path):
    with pytest.raises(ValueError, match="fbuf.datasets.atari_dqn: .*expected"):
        fbuf.datasets.atari_dqn("Pong/1", root=tmp_path, **option)
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
    with _atari_get.held("a test", root / "Pong" / "1"):
        assert opened() == opened(download=False) == rows
        monkeypatch.setattr("fbuf.datasets._lock._PATIENCE", 0.0)
        for option in ({"pieces": [0, 1]}, {"download": "force"}):  # what would be written must wait
            with pytest.raises(BlockingIOError, match="in use by this process"):
                opened(**option)


def test_one_that_another_process_makes_anew_meanwhile_is_opened_as_it_is_then(files, tmp_path, monkeypatch):
    get(tmp_path, files)
    want = get(tmp_path, files)
    calls = []

    def then() -> int:
        if not calls:
            _atari_plan.discard(tmp_path / "Pong" / "1", 0)
            calls.append("gone")
            raise FileNotFoundError
        return len(_pieces.committed(tmp_path / "Pong" / "1"))

    whole = len(_pieces.committed(tmp_path / "Pong" / "1"))
    settings = {"progress": False, "codec": None, "on_corrupt": "raise", "pieces": None, "workers": 0}
    assert (
        _atari_get.get("get", "Pong/1", tmp_path / "Pong" / "1", source=files, download=True, then=then, **settings)
        == whole
    )
    again = get(tmp_path, files, download=False)
    assert all(np.array_equal(again[name], want[name]) for name in ("obs", "action", "truncated"))


def test_default_root(monkeypatch, tmp_path):
    from fbuf.datasets._root import default_root

    monkeypatch.setenv("FBUF_DATASETS", str(tmp_path / "here"))
    assert default_root() == tmp_path / "here"
    monkeypatch.delenv("FBUF_DATASETS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "fbuf" / "datasets"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "fbuf" / "datasets"


def test_a_deleted_data_set_leaves_nothing(files, tmp_path):
    get(tmp_path, files, pieces=[0])
    fbuf.datasets.delete(tmp_path / "Pong" / "1")
    assert os.listdir(tmp_path / "Pong") == []


def test_metadata(files, tmp_path):
    with FaultServer.of(files) as server:
        meta = get(tmp_path, server.base, pieces=[0, 1, 4])["meta"]
    assert (meta["id"], meta["game"], meta["run"], meta["selected"]) == ("Pong/1", "Pong", 1, [0, 1, 4])
    assert meta["settings"]["sticky_actions"] == 0.25
    piece = meta["pieces"]["1"]
    assert (piece["capacity"], piece["add_count"], piece["stack"], piece["horizon"]) == (250, 499, 4, 1)
    file = piece["files"]["$store$_observation"]
    assert file["size"] and len(file["md5"]) == 32 and file["generation"]
    assert [seam["joined"] for seam in meta["seams"]] == [True, False]
