"""`fbuf.datasets.atari_dqn`: games through every view, row by row; and processes that are killed, interrupted and measured."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf import _pieces
from fbuf.datasets import _atari_workers
from fbuf.datasets._atari_piece import schema
from fbuf.datasets._source import list_files
from fbuf.samplers import Epoch
from fbuf.views import Episode, Row, Sequence, Transition
from tests import _atari_pieces as made
from tests._fault_server import FaultServer, Stall
from tests.test_datasets_atari import FRAMES, RUN, get, same

GAMES = {"Pong": (900, 250), "Breakout": (900, 250), "Freeway": (600, 170)}  # steps, and rows of a piece
LOST = 2  # the piece that is missing in the middle


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


CASES = [("Breakout", name) for name in VIEWS] + [("Pong", "n_step"), ("Freeway", "transition")]


@pytest.mark.parametrize(("game", "name"), CASES)
def test_games_through_views_row_by_row(tmp_path: Path, game: str, name: str) -> None:
    """Across pieces, at ends, at the cut where a piece is missing."""
    pytest.importorskip("ale_py")
    steps, capacity = GAMES[game]
    run = made.record(made.play(game, steps, seed=3, max_steps=140), capacity)
    made.write(tmp_path, "Pong/1", run, level=1)
    numbers = [piece.number for piece in run.pieces if piece.number != LOST]
    view, expected = VIEWS[name]
    rows = oracle(run, numbers)
    assert len(numbers) >= 3 and rows.rows["truncated"].sum() == 2 and run.log.terminal.sum() > 3
    options = {"root": tmp_path / "sets", "source": tmp_path, "pieces": numbers, "workers": 0}
    buffer, state = fbuf.datasets.atari_dqn("Pong/1", view=view, sampler=Epoch(shuffle=False), **options)
    want = expected(rows)
    assert want
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


# ------------------------------------------------------------------------------------------------- processes

PROGRAM = """
import sys
import fbuf.datasets
print("begins", flush=True)
fbuf.datasets.atari_dqn("Pong/1", root=sys.argv[1], source=sys.argv[2], workers=int(sys.argv[3]))
print("ends", flush=True)
"""


@pytest.fixture(scope="module")
def run() -> made.Run:
    return made.record(made.synthetic(1000, episode=30), 250)


@pytest.fixture
def server(run: made.Run, tmp_path: Path) -> Iterator[FaultServer]:
    made.write(tmp_path / "files", "Pong/1", run, level=1)
    with FaultServer.of(tmp_path / "files") as server:
        yield server


def start(tmp_path: Path, server: FaultServer, workers: int) -> subprocess.Popen[str]:
    """A program without a guard against being imported again, in a file."""
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    arguments = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), server.base, str(workers)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_a_program_without_a_guard_runs_once(server: FaultServer, run: made.Run, tmp_path: Path) -> None:
    with start(tmp_path, server, 2) as process:
        assert process.communicate(timeout=300)[0].split() == ["begins", "ends"] and process.returncode == 0
    same(get(tmp_path, "/nowhere"), run)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_kill_and_resume(server: FaultServer, run: made.Run, tmp_path: Path, sent: signal.Signals) -> None:
    """Workers end with their parent; the next call goes on with what is missing."""
    server.faults[FRAMES.format(1)] = [Stall(1000)]
    with start(tmp_path, server, 1) as process:
        assert server.stalled.wait(300)
        process.send_signal(sent)
        said = process.communicate(timeout=60)[0]  # after the end of all that have its output open
        assert "ends" not in said and ("KeyboardInterrupt" in said) == (sent == signal.SIGINT)
    done = sorted(_pieces.committed(tmp_path / "Pong" / "1"))
    assert done == [0]
    asked = len(server.asked)
    same(get(tmp_path, server.base), run)
    assert FRAMES.format(0) not in server.asked[asked:] and FRAMES.format(1) in server.asked[asked:]
    assert sorted(os.listdir(tmp_path / "Pong/1")) == ["dataset.json", "pieces"]


@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_workers_end_with_an_error(server: FaultServer, run: made.Run, tmp_path: Path, how: str) -> None:
    """An interrupt here, or the end of a worker, for memory: none goes on, and of its piece nothing is left."""
    server.faults[FRAMES.format(0)] = [Stall(1000)]

    def progress(done: int, total: int) -> None:
        if FRAMES.format(0) in server.asked and server.stalled.wait(60):
            if how == "interrupt":
                raise KeyboardInterrupt
            multiprocessing.active_children()[0].kill()

    with pytest.raises(KeyboardInterrupt if how == "interrupt" else RuntimeError) as info:
        get(tmp_path, server.base, workers=1, progress=progress)
    said = "get: a worker process of Pong/1 ended; memory may have run out"
    assert how == "interrupt" or (str(info.value).startswith(said) and "call again to go on" in str(info.value))
    assert not multiprocessing.active_children()
    assert not list((tmp_path / "Pong/1").glob("*/*"))
    same(get(tmp_path, server.base), run)


def test_memory_does_not_grow_with_the_piece(tmp_path: Path) -> None:
    """40,000 frames, 282 MB: what is held are blocks of them, and what becomes of them."""
    run = made.record(made.synthetic(2000), 1500, final=False)
    rows, folder = 40_000, tmp_path / RUN
    folder.mkdir(parents=True)
    for kind, array in made.arrays(run, run.pieces[0]).items():
        said = {"add_count": np.array(rows - 1), "invalid_range": (rows - 2 + np.arange(5)) % rows}.get(kind, array)
        if kind.startswith("$"):
            said = np.resize(said[:1400], (rows, *array.shape[1:]))
        made.file_of(folder, kind, 0).write_bytes(made.gzip.compress(made.npy(said), 1))
    files = {file.name.removeprefix(RUN).partition("_ckpt")[0]: file for file in list_files(str(tmp_path), RUN)}
    del said
    tracemalloc.start()
    try:
        _atari_workers.run(_atari_workers.Job(tmp_path, 0, files, schema()), lambda nbytes, rows: None)
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert _pieces.committed(tmp_path)[0].rows > 30_000
