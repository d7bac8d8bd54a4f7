"""What torchrl's `AtariDQNExperienceReplay` is known to do wrong, as tests that pass here.

The numbers are those of `torchrl.data.datasets.atari_dqn` 0.14.1, seen with three pieces of twenty steps. Here a run of
synthetic steps is written as files in the public format, and answers are compared with the log it was made from.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.datasets
from fbuf import _pieces
from fbuf.datasets._source import SourceError
from fbuf.samplers import Epoch
from fbuf.views import Episode, Row, Sequence, Transition
from tests.support import atari_pieces as made

ENDS = [64, 150, 260]  # the last rows of three episodes: terminal steps


@pytest.fixture(scope="module")
def run() -> made.Run:
    log = made.synthetic(330, seed=1, episode=10**9)
    log.terminal[:] = False
    log.terminal[ENDS] = True
    return made.record(log, 100)


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


@pytest.fixture(scope="module")
def plain(root: Path, source: Path) -> tuple[fbuf.Buffer, Any]:
    """The buffer of single rows, and its state."""
    return opened(root, source)


def opened(root: Path, source: Any, **options: Any) -> tuple[fbuf.Buffer, Any]:
    return fbuf.datasets.atari_dqn("Pong/1", **{"root": root, "source": source, "workers": 0, "view": Row()} | options)


def anchors(buffer: fbuf.Buffer, state: Any) -> dict[int, dict[str, np.ndarray]]:
    """What is drawn at each row that can be drawn."""
    state, batch = buffer.sample(state, jax.random.key(0), 512)
    data, slots = jax.tree.map(np.asarray, batch.data), np.asarray(batch.index.slot)
    drawn = np.flatnonzero(np.asarray(batch.mask))
    return {int(slots[i]): {name: leaf[i] for name, leaf in data.items()} for i in drawn}


def check_dtypes(data: dict[str, Any]) -> None:
    """`done` was uint8 or bool, [B] or [B, 1], as the sampler went. Here dtypes are those of the files, whatever is drawn."""
    dtypes = [str(data[name].dtype) for name in ("obs", "action", "reward", "terminated", "truncated")]
    assert dtypes == ["uint8", "int32", "float32", "bool", "bool"]
    assert data["terminated"].shape == data["action"].shape == data["reward"].shape


def test_a_batch_over_pieces_is_in_the_order_that_was_asked(plain, root, run):
    """Its batches were grouped by piece, and said another order in `index`; counters were not applied to rows."""
    buffer, state = plain
    assert buffer.capacity == len(run.log)
    asked = [245, 103, 225, 1, 329, 0, 97, 98]
    rows = buffer.get(state, jnp.asarray(asked, jnp.int32))
    assert made.number_of(np.asarray(rows.data["obs"])).tolist() == asked
    np.testing.assert_array_equal(rows.data["action"], run.log.action[asked])
    assert np.asarray(rows.data["truncated"]).tolist() == [row == 329 for row in asked]
    check_dtypes(rows.data)
    batch = buffer.peek(state, jax.random.key(1), 64)
    check_dtypes(batch.data)
    assert made.number_of(np.asarray(batch.data["obs"])).tolist() == np.asarray(batch.index.slot).tolist()
    about = fbuf.datasets.info(root / "Pong" / "1").meta["pieces"]
    assert [about[str(n)]["add_count"] for n in range(3)] == [99, 199, 299]


def test_windows_over_pieces_are_not_torn(root, source, plain, run):
    """133 of 200 batches of slices mixed rows of several pieces up; of a data set on the disk they were an error."""
    buffer, state = fbuf.datasets.open(root / "Pong" / "1", view=Row())
    assert buffer == plain[0] == pickle.loads(pickle.dumps(buffer))  # its collate function was a lambda
    windows = dataclasses.replace(buffer, view=Sequence(20))
    batch = windows.peek(buffer.convert(windows, state), jax.random.key(0), 128)
    numbers = made.number_of(np.asarray(batch.data["obs"]))
    np.testing.assert_array_equal(numbers, np.asarray(batch.index.slot)[:, None] + np.arange(20))
    np.testing.assert_array_equal(batch.data["action"], run.log.action[numbers])
    assert any(set(range(95, 101)) <= set(row.tolist()) for row in numbers)  # some lie across the first seam
    check_dtypes(batch.data)


def test_a_terminal_step_is_the_last_of_its_own_episode(root, source):
    """Its episode ids counted an end with the episode after it: slices never ended in a terminal, and began with one."""
    found = anchors(*opened(root, source, view=Episode(120), sampler=Epoch(shuffle=False)))
    lengths = {slot: int(data["mask"].sum()) for slot, data in found.items()}
    assert lengths == {0: 65, 65: 86, 151: 110, 261: 69}
    for slot, data in found.items():
        ends = data["terminated"][: lengths[slot]]
        assert not ends[:-1].any() and ends[-1] == (slot != 261)
        assert data["truncated"][: lengths[slot]].any() == (slot == 261)


def test_next_observations_are_those_that_came_next(root, source, run):
    """They were zeros at the end of each piece, and after an end the next episode's first frame. An end needs none here."""
    found = anchors(*opened(root, source, view=Transition(stack=2, gamma=0.5), sampler=Epoch(shuffle=False)))
    assert sorted(found) == list(range(329))  # the last row of all has none, and is not drawn
    for row in (int(piece.rows[run.capacity - 2]) for piece in run.pieces[:-1]):
        assert row not in ENDS and found[row]["discount"] == 0.5
        np.testing.assert_array_equal(found[row]["next_obs"][-1], run.log.obs[row + 1])
    for row in ENDS:
        assert found[row]["discount"] == 0 and made.number_of(found[row]["next_obs"]).max() == row
        first = found[row + 1]["obs"]
        assert not first[0].any() and made.number_of(first[1]) == row + 1  # no stack reaches back over the end


def test_a_piece_may_be_missing_in_the_middle(source, run, tmp_path):
    """It was an IndexError: the number of a piece was taken for its place. And episodes ran on across the gap."""
    opened(tmp_path, source, pieces=[0, 2])
    rows, cut = run.expected([0, 2])
    with _pieces.DataSet.open(tmp_path / "Pong" / "1") as dataset:
        found = dataset.read_rows(0, dataset.rows)
    assert made.number_of(found["obs"]).tolist() == rows.tolist()
    assert np.flatnonzero(found["truncated"]).tolist() == np.flatnonzero(cut).tolist() == [92, len(rows) - 1]


def test_no_network_is_told_at_once(tmp_path):
    """Offline it hung for ten minutes, and then said that there were no files."""
    with pytest.raises(SourceError, match="cannot be listed: .*Cannot connect to host 127.0.0.1:9"):
        opened(tmp_path, "http://127.0.0.1:9")
