"""What torchrl's `AtariDQNExperienceReplay` is known to do wrong, as tests that pass here.

The numbers are those of `torchrl.data.datasets.atari_dqn` 0.14.1, seen with three pieces of twenty steps. Here a run of
synthetic steps is written as files in the public format, and answers are compared with the log it was made from.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf import _pieces
from fbuf.datasets import _atari_get
from fbuf.datasets._source import FileCorrupted, Retry, SourceError, connect
from fbuf.samplers import Epoch
from fbuf.views import Episode, Row, Sequence, Transition
from tests import _atari_pieces as made
from tests._fault_server import FaultServer, Status

END = 64  # the last row of the first episode: a terminal step
RUN = "dqn/Pong/1/replay_logs/"


def log_with_ends() -> made.Log:
    log = made.synthetic(330, seed=1, episode=10**9)
    log.terminal[:] = False
    log.terminal[[END, 150, 260]] = True
    return log


@pytest.fixture(scope="module")
def run() -> made.Run:
    return made.record(log_with_ends(), 100)


@pytest.fixture(scope="module")
def source(run: made.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    made.write(root, "Pong/1", run, level=1)
    return root


@pytest.fixture(scope="module")
def root(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data sets, with all of the run."""
    folder = tmp_path_factory.mktemp("sets")
    opened(folder, source)
    return folder


def opened(root: Path, source: Any, **options: Any) -> tuple[fbuf.Buffer, Any]:
    return fbuf.datasets.atari_dqn("Pong/1", **{"root": root, "source": source, "workers": 0, "view": Row()} | options)


def anchors(buffer: fbuf.Buffer, state: Any) -> dict[int, dict[str, np.ndarray]]:
    """What is drawn at each row that can be drawn."""
    state, batch = buffer.sample(state, jax.random.key(0), 512)
    data, mask = jax.tree.map(np.asarray, batch.data), np.asarray(batch.mask)
    return {
        int(slot): {name: leaf[i] for name, leaf in data.items()}
        for i, slot in enumerate(np.asarray(batch.index.slot))
        if mask[i]
    }


@pytest.fixture(scope="module")
def transitions(root: Path, source: Path) -> dict[int, dict[str, np.ndarray]]:
    view = Transition(stack=2, gamma=0.5)
    return anchors(*opened(root, source, view=view, sampler=Epoch(shuffle=False)))


@pytest.fixture(scope="module")
def plain(root: Path, source: Path) -> tuple[fbuf.Buffer, Any]:
    """The buffer of single rows, and its state."""
    return opened(root, source)


def check_dtypes(data: dict[str, Any]) -> None:
    """`done` was uint8 or bool, [B] or [B, 1], as the sampler went. Here dtypes are those of the files, whatever is drawn."""
    dtypes = [str(data[name].dtype) for name in ("obs", "action", "reward", "terminated", "truncated")]
    assert dtypes == ["uint8", "int32", "float32", "bool", "bool"]
    assert data["terminated"].shape == data["action"].shape == data["reward"].shape


def last_rows(run: made.Run) -> list[int]:
    """Rows of the log that are the newest of their piece, but for the last piece: they lie before the write head."""
    return [int(piece.rows[run.capacity - 2]) for piece in run.pieces[:-1]]


def test_1_a_batch_over_pieces_is_in_the_order_that_was_asked(plain, run):
    """Its batches were grouped by piece: asked for [45, 3, 25, 1] it gave 3, 1, 25, 45, and said another order in `index`."""
    buffer, state = plain
    asked = [245, 103, 225, 1, 329, 0, 97, 98]
    rows = buffer.get(state, jnp.asarray(asked, jnp.int32))
    assert made.number_of(np.asarray(rows.data["obs"])).tolist() == asked
    np.testing.assert_array_equal(rows.data["action"], run.log.action[asked])
    check_dtypes(rows.data)
    batch = buffer.peek(state, jax.random.key(1), 64)
    check_dtypes(batch.data)
    assert made.number_of(np.asarray(batch.data["obs"])).tolist() == np.asarray(batch.index.slot).tolist()


def test_1_windows_over_pieces_are_not_torn(root, source, run):
    """133 of 200 batches of slices mixed rows of several pieces up."""
    buffer, state = opened(root, source, view=Sequence(20))
    batch = buffer.peek(state, jax.random.key(0), 128)
    first = np.asarray(batch.index.slot)
    numbers = made.number_of(np.asarray(batch.data["obs"]))
    np.testing.assert_array_equal(numbers, first[:, None] + np.arange(20))
    np.testing.assert_array_equal(batch.data["action"], run.log.action[numbers])
    check_dtypes(batch.data)
    seams = list(range(95, 101))
    assert any(set(seams) <= set(row.tolist()) for row in numbers)  # some lie across the first seam


def test_2_a_terminal_step_is_the_last_of_its_own_episode(root, source, run):
    """Its episode ids counted an end with the episode after it: slices never ended in a terminal, and began with one."""
    buffer, state = opened(root, source, view=Episode(120), sampler=Epoch(shuffle=False))
    found = anchors(buffer, state)
    lengths = {slot: int(data["mask"].sum()) for slot, data in found.items()}
    assert lengths == {0: END + 1, END + 1: 150 - END, 151: 110, 261: 69}
    for slot, data in found.items():
        ends = data["terminated"][: lengths[slot]]
        assert not ends[:-1].any() and ends[-1] == (slot != 261)
        assert data["truncated"][: lengths[slot]].any() == (slot == 261)


def test_3_a_piece_ends_where_the_next_begins(transitions, run):
    """The next observation of each piece's last row was zeros, with nothing that said so: 49 of them in a run."""
    assert not run.log.terminal[last_rows(run)].any() and len(last_rows(run)) == 3
    for row in last_rows(run):
        assert made.number_of(transitions[row]["next_obs"][-1]) == row + 1
        np.testing.assert_array_equal(transitions[row]["next_obs"][-1], run.log.obs[row + 1])
        assert transitions[row]["discount"] == 0.5


def test_3_the_last_row_of_all_is_truncated_and_not_drawn(transitions, plain):
    buffer, state = plain
    assert sorted(transitions) == list(range(329))
    assert np.asarray(buffer.get(state, jnp.asarray([329])).data["truncated"]).tolist() == [True]


def test_3_what_is_lost_between_pieces_is_not_joined(source, run, tmp_path):
    """Episodes ran on across pieces, whether or not logging had."""
    opened(tmp_path, source, pieces=[0, 2])
    rows, cut = run.expected([0, 2])
    with _pieces.DataSet.open(tmp_path / "Pong" / "1") as dataset:
        truncated = dataset.read_rows(0, dataset.rows, ["truncated"])["truncated"]
    assert np.flatnonzero(truncated).tolist() == np.flatnonzero(cut).tolist() == [92, len(rows) - 1]


def test_4_nothing_of_the_next_episode_is_next(transitions):
    """Asked for one row, it gave the first frame of the next episode as the next observation of an end."""
    assert transitions[END]["discount"] == 0
    assert made.number_of(transitions[END]["next_obs"]).max() == END
    first = transitions[END + 1]["obs"]
    assert not first[0].any() and made.number_of(first[1]) == END + 1  # and no stack reaches back over it


def test_5_counters_are_applied(plain, root, run):
    """`add_count` and `invalid_range` were handed out, and rows that were never written, or long before, as steps."""
    buffer, state = plain
    assert buffer.capacity == len(run.log)
    actions = np.asarray(buffer.get(state, jnp.arange(330, dtype=jnp.int32)).data["action"])
    np.testing.assert_array_equal(actions, run.log.action)
    about = fbuf.datasets.info(root / "Pong" / "1").meta["pieces"]
    assert [about[str(n)]["add_count"] for n in range(3)] == [99, 199, 299]
    assert sum(piece["blanks"] for piece in about.values()) > 0


def test_6_a_piece_may_be_missing_in_the_middle(source, run, tmp_path):
    """It was an IndexError: the number of a piece was taken for its place."""
    buffer, state = opened(tmp_path, source, pieces=[0, 2])
    rows, _ = run.expected([0, 2])
    assert buffer.capacity == len(rows)
    got = buffer.get(state, jnp.arange(len(rows), dtype=jnp.int32)).data["obs"]
    assert made.number_of(np.asarray(got)).tolist() == rows.tolist()


def test_7_a_data_set_that_is_there_gives_windows_too(root, plain):
    """Slices of a data set that was loaded from a path were an AttributeError."""
    opened_again, state = fbuf.datasets.open(root / "Pong" / "1", view=Row())
    assert opened_again == plain[0]
    other = dataclasses.replace(opened_again, view=Sequence(20))
    batch = other.peek(opened_again.convert(other, state), jax.random.key(0), 128)
    assert (np.diff(made.number_of(np.asarray(batch.data["obs"])), axis=1) == 1).all()


def test_8_an_end_needs_no_next_observation(transitions, run):
    """The frame after an end is in no file; zeros stood for it. Nothing here is learned from it: `discount` is 0."""
    ends = np.flatnonzero(run.log.terminal)
    assert len(ends) == 3
    assert [float(transitions[end]["discount"]) for end in ends] == [0.0] * 3


# ------------------------------------------------------------------------------------------------- the download


def test_no_program_is_called(source, tmp_path, monkeypatch):
    """It called gsutil through a shell, and asked for it with an error that never came."""

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError(f"a program was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", never)
    buffer, _ = opened(tmp_path, source)
    assert buffer.capacity == 330


def test_no_network_is_told_at_once(tmp_path):
    """Offline it hung for ten minutes, and then said that there were no files."""
    begun = time.monotonic()
    with pytest.raises(SourceError, match="failed twice in a row"):
        opened(tmp_path, connect("http://127.0.0.1:9", retry=Retry(attempts=2, first=0.01)))
    assert time.monotonic() - begun < 5


def test_a_failed_transfer_is_an_error_and_keeps_what_is_whole(source, run, tmp_path):
    """A copy that failed was noticed when its keys were missing; any exception removed the whole data set."""
    name = f"{RUN}$store$_observation_ckpt.2.gz"
    with FaultServer.of(source) as server:
        server.fault(name, Status(503, times=9))
        mirror = connect(server.base, retry=Retry(attempts=2, first=0.01))
        with pytest.raises(SourceError, match="piece 2 of Pong/1.*Call again to go on"):
            opened(tmp_path, mirror)
        first = f"{RUN}$store$_observation_ckpt.0.gz"
        sent = server.sent(first)
        assert sent == (source / first).stat().st_size
        buffer, _ = opened(tmp_path, connect(server.base, retry=Retry(attempts=20, first=0.01, most=0.01)))
        assert buffer.capacity == 330 and server.sent(first) == sent  # and the whole ones do not come again


def test_damage_is_noticed_before_it_is_used(source, run, tmp_path):
    """There was no checksum anywhere."""
    files = tmp_path / "files"
    made.write(files, "Pong/1", run, level=1)
    made.damage(made.file_of(files / RUN, "$store$_observation", 1))
    with pytest.raises(FileCorrupted, match="piece 1 of Pong/1"):
        opened(tmp_path / "sets", files)


def test_the_last_ten_games_are_there():
    """StarGunner to Zaxxon were not in its list."""
    last = "StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"
    assert {f"{game}/{run}" for game in last.split() for run in range(1, 6)} <= set(fbuf.datasets.available())


def test_options_are_known_or_refused():
    """`strict_len` was taken and never read; `strict_length`, which was documented, raised."""
    source = inspect.getsource(fbuf.datasets.atari_dqn) + inspect.getsource(_atari_get.get)
    for name in inspect.signature(fbuf.datasets.atari_dqn).parameters:
        assert source.count(name) >= 3, f"{name} is not used"
    with pytest.raises(TypeError, match="strict_len"):
        fbuf.datasets.atari_dqn("Pong/1", strict_len=True)  # type: ignore[call-arg]


def test_a_part_of_a_run_does_not_make_the_rest_be_fetched_again(source, tmp_path):
    """Its limit of pieces was one number for the class, and another value fetched everything anew."""
    opened(tmp_path, source, pieces=[0])
    before = _pieces.committed(tmp_path / "Pong/1")[0].save
    buffer, _ = opened(tmp_path, source)
    assert buffer.capacity == 330 and _pieces.committed(tmp_path / "Pong/1")[0].save == before


def test_the_buffer_is_a_value(plain):
    """Its collate function was a lambda, so that the data set could not be sent to another process."""
    buffer, _ = plain
    assert pickle.loads(pickle.dumps(buffer)) == buffer
