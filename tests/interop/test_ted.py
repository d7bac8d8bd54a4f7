"""Rows as transitions in torchrl's layout: the documentation's words as plain Python, over any episodes."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._rows import row_reader as _row_reader
from fbuf.interop import _ted, to_ted
from tests.support.interop import from_arrays
from tests.support.refusals import raises


def expected(lanes, *, final=False, given=False, resets=False):
    """Return the rows that `to_ted` writes, lane by lane, as its documentation says, and how many it drops."""
    out, dropped = [], 0
    for rows in lanes:
        kinds, resetting = [], False
        for row in rows:
            kinds.append("reset" if resetting else "step")
            resetting = resets and not resetting and (row["terminated"] or row["truncated"]) and not row["cut"]
        kept = []
        for i, row in enumerate(rows):
            if kinds[i] == "reset":
                kept.append(None)
                continue
            end = row["terminated"] or row["truncated"]
            after = rows[i + 1]["obs"] if i + 1 < len(rows) else None
            if given:
                successor = row["given"]
            elif row["cut"]:
                successor = None
            elif end and resets:
                successor = after
            elif end:
                successor = row["final"] if final else None
            else:
                successor = after
            if successor is None and row["terminated"]:
                successor = row["obs"]
            if successor is None:
                kept.append("dropped")
                dropped += 1
                continue
            truncated = row["truncated"] or (row["cut"] and not row["terminated"])
            kept.append([row["obs"], successor, row["reward"], row["terminated"], truncated])
        for i, (row, entry) in enumerate(zip(rows, kept, strict=True)):
            if isinstance(entry, list) and not (row["terminated"] or entry[4]):
                entry[4] = i + 1 == len(rows) or not isinstance(kept[i + 1], list)
        out += [entry for entry in kept if isinstance(entry, list)]
    return out, dropped


@st.composite
def episodes(draw):
    lanes = draw(st.integers(1, 2))
    n = draw(st.integers(0, 10))
    kinds = st.sampled_from(["", "", "", "t", "u", "tu", "c", "tc"])
    ends = draw(st.lists(kinds, min_size=n * lanes, max_size=n * lanes))
    return lanes, n, np.array(ends, "U2").reshape(n, lanes)


class Table:
    """A `Reader` of numpy arrays `[n, E, ...]`, without a buffer."""

    def __init__(self, call, buffer, rows):
        self.buffer, self.rows = buffer, rows
        steps, lanes = rows["reward"].shape
        self.spec = {n: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for n, x in rows.items()}
        self.sizes, self.steps, self.lanes = np.full(lanes, steps), steps, lanes

    def mask(self, first, last):
        return np.ones((last - first, len(self.sizes)), bool)

    def flag(self, name):
        return self.rows[name]

    def cuts(self):
        return self.rows["cut"]

    def slots(self, age, lane):
        return age * self.lanes + lane

    def block(self, name):
        return 3

    def leaf(self, name, slot, block):
        assert len(slot) <= block
        flat = self.rows[name].reshape(self.steps * self.lanes, *self.spec[name].shape)
        flat = np.concatenate([flat, np.zeros((1, *flat.shape[1:]), flat.dtype)])
        return flat[np.minimum(slot, len(flat) - 1)]


@pytest.fixture(scope="module")
def any_state():
    return fbuf.Buffer(1).init(0.0)


@given(case=episodes(), mode=st.sampled_from(["plain", "final", "given", "resets"]))
def test_any_episodes_are_written_as_documented(case, mode, any_state, tmp_path_factory):
    lanes, n, ends = case
    path = tmp_path_factory.mktemp("ted") / "a.npz"
    final, given_next, resets = mode == "final", mode == "given", mode == "resets"
    autoreset = "next_step" if resets else "same_step"
    view = fbuf.views.Transition(final_observation="final" if final else None, autoreset=autoreset)
    buffer = fbuf.Buffer(11 * lanes, lanes=lanes, view=view)  # never full
    t = np.arange(n * lanes, dtype=np.float32).reshape(n, lanes)
    rows = {
        "obs": np.stack([t, -t], -1),
        "action": t.astype(np.int32),
        "reward": t / 2,
        "terminated": np.char.count(ends, "t") > 0,
        "truncated": np.char.count(ends, "u") > 0,
        "cut": np.char.count(ends, "c") > 0,
        "final": np.stack([t + 0.25, t], -1),
        "given": np.stack([t + 0.75, t], -1),
    }
    table = [[{name: leaf[i, lane].tolist() for name, leaf in rows.items()} for i in range(n)] for lane in range(lanes)]
    wanted, dropped = expected(table, final=final, given=given_next, resets=resets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ted, "Reader", lambda call, buffer, state: Table(call, buffer, rows))
        done = to_ted(path, buffer, any_state, next_observation="given" if given_next else None)
    with np.load(path) as file:
        got = {name: file[name] for name in file.files}
    assert (done.rows, done.dropped) == (len(wanted), dropped)
    columns = ("observation", "next/observation", "next/reward", "next/terminated", "next/truncated")
    for column, name in enumerate(columns):
        values = [np.ravel(row[column]).tolist() for row in wanted]
        assert got[name].reshape(len(wanted), got[name].shape[1]).tolist() == values, name
    assert (got["next/done"] == got["next/terminated"] | got["next/truncated"]).all()
    assert not got["done"].any() and got["next/reward"].shape == (len(wanted), 1)
    ids, over = got["collector/traj_ids"], got["next/done"][:, 0]
    # The numbers of an episode are equal and adjacent, and its last row is done.
    assert (ids[1:] >= ids[:-1]).all() and ((ids[1:] != ids[:-1]) == over[:-1]).all() and over[-1:].all()
    assert done.episodes == len(set(ids.tolist()))


@pytest.mark.more
def test_full_rings_of_compressed_rows_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr(_row_reader, "BLOCK_BYTES", 100)
    view = fbuf.views.Transition(truncated=None, stack=2, autoreset="same_step")
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Compressed(keys=("obs",)), view=view)
    example = {"obs": np.zeros((2, 2), np.uint8), "action": 0, "reward": 0.0, "terminated": False, "extra": {"v": 0.0}}
    t = np.arange(13)
    rows = {"obs": np.broadcast_to(t[:, None, None], (13, 2, 2)).astype(np.uint8), "action": t.astype(np.int32)}
    rows |= {"reward": t.astype(np.float32), "terminated": t == 8, "extra": {"v": t.astype(np.float32)}}
    state = buffer.extend(buffer.init(example), rows)
    done = to_ted(tmp_path / "a.npz", buffer, state, names={"obs": "pixels", "extra": "e"}, episode="episode")
    with np.load(tmp_path / "a.npz") as file:
        assert file["action"].tolist() == [5, 6, 7, 8, 9, 10, 11] and done.dropped == 1
        assert file["next/pixels"][:, 0, 0].tolist() == [6, 7, 8, 8, 10, 11, 12]
        assert file["next/done"][:, 0].tolist() == [False] * 3 + [True] + [False] * 2 + [True]
        assert file["e/v"].tolist() == file["action"].tolist() and file["episode"].tolist() == [0] * 4 + [1] * 3
        assert file["next/reward"].tolist() == [[t] for t in file["action"].tolist()]


def test_the_oldest_row_of_a_full_ring_may_be_a_reset_row(tmp_path):
    buffer = fbuf.Buffer(4, view=fbuf.views.Transition(autoreset="next_step", truncated=None))
    example = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
    t = np.arange(6, dtype=np.int32)
    rows = {"obs": t.astype(np.float32), "action": t, "reward": t.astype(np.float32), "terminated": t == 1}
    state = buffer.extend(buffer.init(example), rows)  # row 2 is a reset row, and the oldest
    done = to_ted(tmp_path / "a.npz", buffer, state)
    with np.load(tmp_path / "a.npz") as file:
        assert file["action"].tolist() == [3, 4] and done.dropped == 2


def test_invalid_arguments_are_refused(tmp_path):
    rows = {"obs": np.zeros((3, 2), np.float32), "action": np.zeros(3, np.int32), "reward": np.zeros(3, np.float32)}
    buffer, state = from_arrays(rows | {"terminated": np.zeros(3, bool)})
    for settings, match in (
        ({"observation": "o"}, "observation is 'o', but rows have .* Pass observation="),
        ({"terminated": "reward"}, r"terminated is 'reward', float32\[\]; expected one bool per row"),
        ({"next_observation": "reward"}, "next_observation is 'reward' with"),
        ({"episode": "action"}, "'action' would be two columns"),
        ({"names": {"action": "next"}}, "'next' would be a column and a group"),
    ):
        raises(ValueError, match, to_ted, tmp_path / "a.npz", buffer, state, **settings)
    assert not list(tmp_path.iterdir())
