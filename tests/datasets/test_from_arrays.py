"""Data sets from flat arrays, as D4RL and others have them, from streams and from files, against plain-Python episodes."""

import tempfile
import weakref

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._formats import dataset as _dataset
from fbuf._formats.dataset import chunked_leaf
from fbuf._rows.columns import Column
from fbuf.datasets import _lock
from fbuf.datasets._arrays.write import Settings, write_columns
from tests.support import datasets_oracle as oracle
from tests.support.refusals import raises

OBS = {"obs": ((3,), np.float32)}
ACTION = {"action": ((2,), np.float32)}
LENGTHS = (4, 1, 6, 3, 5)
ROW = fbuf.views.Row()  # compiles nothing


def made(lengths=LENGTHS, seed=0):
    return oracle.episodes(seed, lengths, OBS, ACTION)


def flat(episodes, following=False):
    rows = oracle.rows_of(episodes, final=False)
    out = {
        "observations": rows["obs"],
        "actions": rows["action"],
        "rewards": rows["reward"].astype(np.float32),
        "terminals": rows["terminated"],
        "timeouts": rows["truncated"],
    }
    if following:
        out["next_observations"] = np.concatenate([e.obs["obs"][1:] for e in episodes])
    return out


def files(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*")) if path.exists() else []


def test_steps_whose_successor_is_unknown_are_not_drawn(tmp_path):
    episodes = made()
    buffer, state = oracle.from_arrays(flat(episodes), path=tmp_path / "a", segment_rows=4)
    assert buffer.view == fbuf.views.Transition(autoreset="same_step") and buffer.capacity == 19
    assert sorted(_dataset.committed(tmp_path / "a")) == [0, 1, 2, 3, 4]
    oracle.check_rows(buffer, state, oracle.rows_of(episodes, final=False))
    oracle.check_transitions(buffer, state, episodes, n=3, final=False)


def test_next_observations_are_kept_where_episodes_end(tmp_path):
    episodes = made()
    data = flat(episodes, following=True)
    buffer, _ = oracle.from_arrays(data, path=tmp_path / "a", segment_rows=4, workers=3)
    assert buffer.view == fbuf.views.Transition(final_observation="final_obs")  # what it draws: test_preprocess
    oracle.check_files(tmp_path / "a", oracle.rows_of(episodes))
    np.savez(tmp_path / "a.npz", **data)
    oracle.from_arrays(tmp_path / "a.npz", path=tmp_path / "b", segment_rows=7, view=ROW)
    oracle.check_files(tmp_path / "b", oracle.rows_of(episodes))


def test_gaps_between_next_observations_end_episodes(tmp_path):
    """`d4rl.qlearning_dataset` leaves out rows that timed out."""
    episodes = made()
    data = flat(episodes, following=True)
    keep = ~data.pop("timeouts")
    data = {name: leaf[keep] for name, leaf in data.items()}
    oracle.from_arrays(data, path=tmp_path / "a", view=ROW, ends="terminated")
    left = []
    for e in episodes:
        steps = e.steps if e.terminated else e.steps - 1
        if steps:
            obs, action = ({n: x[: steps + k] for n, x in of.items()} for k, of in ((1, e.obs), (0, e.action)))
            left.append(oracle.Episode(obs, action, e.reward[:steps], e.terminated))
    oracle.check_files(tmp_path / "a", oracle.rows_of(left))


@pytest.mark.more
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(2, 9), st.booleans(), st.integers(0, 5))
def test_episodes_segments_and_streams_may_have_any_length(lengths, segment, following, chunk):
    episodes = made(tuple(lengths))
    data = flat(episodes, following)
    expected = oracle.rows_of(episodes, final=following)
    if chunk:
        rows = len(data["rewards"])
        whole = data
        data = ({n: x[i : i + chunk] for n, x in whole.items()} for i in range(0, rows, chunk))
    with tempfile.TemporaryDirectory() as folder:
        oracle.from_arrays(data, path=f"{folder}/a", segment_rows=segment, view=ROW)
        oracle.check_files(f"{folder}/a", expected)
        sizes = [info.rows for info in _dataset.committed(f"{folder}/a").values()]
    assert sizes[:-1] == [segment] * (len(sizes) - 1) and 0 < sizes[-1] <= segment


def test_leaves_may_be_nested_renamed_and_coded(tmp_path):
    data = {
        "observations": {"image": np.arange(5 * 400, dtype=np.uint8).reshape(5, 20, 20), "goal": jnp.arange(5)},
        "actions": np.arange(5, dtype=np.int64),
        "rewards": [1, 2, 3, 4, 5],
        "dones": np.array([0, 1, 0, 0, 0], np.float32),
        "infos": {"qpos": np.ones((5, 2), np.float16)},
    }
    raises(ValueError, r"no leaf says where episodes", oracle.from_arrays, data, path=tmp_path / "a")
    settings = {"episode_end": ("dones",), "metadata": {"by": "me"}}
    buffer, state = oracle.from_arrays(data, path=tmp_path / "a", **settings, view=ROW)
    rows = buffer.rows(state).data
    assert rows["truncated"].tolist() == [False, True, False, False, True] and not rows["terminated"].any()
    assert rows["action"].dtype == np.int32 and rows["infos"]["qpos"].dtype == np.float16
    assert np.array_equal(rows["obs"]["image"], data["observations"]["image"])
    assert fbuf.datasets.info(tmp_path / "a").meta["by"] == "me"
    fields = {"dones": "terminated", "actions": "action"}
    buffer, _ = oracle.from_arrays(data, path=tmp_path / "b", fields=fields)
    assert buffer.view == ROW
    ended = np.arange(5) == 1
    expected = {"action": data["actions"], "terminated": ended, "truncated": np.arange(5) == 4}
    oracle.check_files(tmp_path / "b", expected)
    codec = {"obs/image": fbuf.storages.Raw()}
    oracle.from_arrays(data, path=tmp_path / "c", episode_end=(), codec=codec, view=ROW)
    with _dataset.DataSet.open(tmp_path / "c") as dataset:
        assert dataset.read_rows(0, 5)["truncated"].tolist() == [False] * 4 + [True]
        assert dataset.schema["obs/image"].codec is None


def test_long_runs_of_chunks_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(chunked_leaf, "_MAX_READ", 5000)
    images = np.random.default_rng(0).integers(0, 256, (100, 40, 40), np.uint8)
    data = {
        "observations": images,
        "actions": np.arange(100),
        "rewards": np.zeros(100, np.float32),
        "dones": np.arange(100) == 99,
    }
    buffer, state = oracle.from_arrays(data, path=tmp_path / "a", episode_end=("dones",), view=ROW)
    np.testing.assert_array_equal(buffer.rows(state).data["obs"], images)


def test_memory_maps_and_groups_are_read_in_slices(tmp_path):
    episodes = made()
    data = flat(episodes)
    expected = oracle.rows_of(episodes, final=False)
    data["observations"].tofile(tmp_path / "obs")
    mapped = np.memmap(tmp_path / "obs", np.float32, "r", shape=data["observations"].shape)
    oracle.from_arrays(data | {"observations": mapped}, path=tmp_path / "a", view=ROW)
    oracle.check_files(tmp_path / "a", expected)
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, leaf in data.items():
            file[f"offline/{name}"] = leaf
        file["offline/metadata/algorithm"] = "SAC"
        file["offline/metadata/weight"] = np.zeros((3, 3), np.float32)
    names = list(data)
    with h5py.File(tmp_path / "d4rl.hdf5") as file:
        group = file["offline"]
        raises(
            ValueError,
            r"'metadata/weight' has 3 rows",
            oracle.from_arrays,
            group,
            path=tmp_path / "b",
            fields=[*names, "metadata/weight"],
        )
        oracle.from_arrays(group, path=tmp_path / "b", segment_rows=5, workers=2, view=ROW)
        oracle.check_files(tmp_path / "b", expected)
    there = {f"offline/{n}": n for n in names}
    file, path = tmp_path / "d4rl.hdf5", tmp_path / "c"
    raises(ValueError, r"Leave it out: fields=\['offline/", oracle.from_arrays, file, path=path)
    fields = dict(zip(there, ("obs", "action", "reward", "terminated", "truncated"), strict=True))
    oracle.from_arrays(file, path=path, fields=fields, view=ROW)
    oracle.check_files(tmp_path / "c", expected)


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_files_of_to_file_are_read(tmp_path, suffix):
    rows = {"obs": np.arange(6).astype(jnp.bfloat16), "done": np.arange(6) == 5}
    fbuf.interop.to_file(tmp_path / f"one{suffix}", *fbuf.interop.from_arrays(rows).into())
    buffer, state = oracle.from_arrays(tmp_path / f"one{suffix}", path=tmp_path / "a", episode_end=("done",))
    assert buffer.rows(state).data["obs"].dtype == jnp.bfloat16
    oracle.check_files(tmp_path / "a", rows | {"terminated": np.zeros(6, bool), "truncated": rows["done"]})
    lanes = {name: leaf.reshape(3, 2) for name, leaf in rows.items()}
    fbuf.interop.to_file(tmp_path / f"two{suffix}", *fbuf.interop.from_arrays(lanes, lanes=2).into())
    oracle.from_arrays(tmp_path / f"two{suffix}", path=tmp_path / "b", view=ROW, segment_rows=2)
    by_lane = {name: leaf.T.reshape(-1) for name, leaf in lanes.items()}
    cut = np.array([False, False, True, False, False, True])
    oracle.check_files(tmp_path / "b", by_lane | {"terminated": np.zeros(6, bool), "truncated": cut})


def bad(**change):
    """Return the arrays with some leaves changed, or left out where they are None."""
    return {name: leaf for name, leaf in (flat(made()) | change).items() if leaf is not None}


NAN = np.where(np.arange(19) == 7, np.nan, 1).astype(np.float32)
WRONG = [
    (bad(rewards=np.ones(18, np.float32)), ValueError, "'rewards' has 18 rows; expected 19.*fields="),
    (bad(rewards=NAN), ValueError, "leaf 'reward' is nan in row 7"),
    (bad(rewards=np.ones(19)), TypeError, r"leaf 'reward' is float64.*dtypes=\{'reward': 'float32'\}"),
    (bad(words=np.array(["a"] * 19)), ValueError, "leaf 'words' is <U1; expected plain numbers"),
    (bad(things=np.array([None] * 19)), ValueError, "leaf 'things' is object; expected plain numbers"),
    (bad(lists=[[1], [2, 3]]), ValueError, "leaf 'lists' is not an array"),
    (bad(swapped=np.zeros(19, ">f4")), ValueError, r"or booleans. Pass x.astype\('float32'\). Leave it out: fields="),
    (bad(terminals=np.full(19, 2)), ValueError, "leaf 'terminated' is 2 in row 0; expected 0 or 1"),
    (bad(terminals=np.zeros((19, 1), bool)), ValueError, r"leaf 'terminated' has shape .*; expected \[N\]"),
    (bad(terminated=np.zeros(19)), ValueError, "'terminals' and 'terminated' would be 'ter.* Leave one out: fields"),
    (bad(observation={"a": NAN}), ValueError, r"'observation/a' would be 'obs' and 'obs/a'\. Leave one out: fields="),
    (bad(next_observations=np.zeros((19, 4), np.float32)), ValueError, "expected the observations' "),
    (bad(terminals=None, timeouts=None), ValueError, "no leaf says where episodes end"),
    ({"a": {"b": np.zeros(3)}, "a/b": np.ones(3)}, ValueError, "two leaves have the name 'a/b'"),
    (bad(gamma=0.99), ValueError, "leaf 'gamma' is a scalar"),
    (bad(actions=np.full(19, 2**40)), ValueError, "hold values that int32 cannot"),
    ({name: leaf[:0] for name, leaf in bad().items()}, ValueError, "there are no rows"),
    ({}, ValueError, "there are no"),
    ({1: np.zeros(3)}, TypeError, "a dict has the key 1"),
]


def refused(data, kind, words, folder):
    for rows in (data, iter([data])):
        raises(kind, words, oracle.from_arrays, rows, path=folder / "a")
        assert files(folder) == []


def test_invalid_data_is_refused_and_leaves_nothing(tmp_path):
    for wrong in WRONG:
        refused(*wrong, tmp_path)


def test_tensors_are_refused(tmp_path):
    data = bad(tensor=pytest.importorskip("torch").zeros(19))
    refused(data, ValueError, "is torch.float32; expected plain numbers, or booleans. Pass x.numpy()", tmp_path)


def test_invalid_settings_are_refused(tmp_path):
    wrong = [
        ({"segment_rows": 0}, ValueError, "segment_rows is 0"),
        ({"workers": -1}, ValueError, "workers is -1"),
        ({"episode_end": "dones"}, TypeError, r"episode_end=\('dones',\)"),
        ({"episode_end": ("dones",)}, ValueError, "episode_end has 'dones', but rows have"),
        ({"fields": "obs"}, TypeError, r"fields=\('obs',\)"),
        ({"fields": ["obs"]}, ValueError, "fields has 'obs', which is missing"),
        ({"dtypes": {"observations": "float16"}}, ValueError, r"dtypes has 'observations', but leaves are obs"),
        ({"codec": {"odd": fbuf.storages.Zstd()}}, ValueError, "codec names 'odd'"),
        ({"metadata": {"a": object()}}, TypeError, "metadata is not JSON"),
        ({"view": fbuf.views.Transition}, TypeError, "view is the class Transition"),
        ({"sampler": 3}, TypeError, "sampler is 3"),
        ({"sampler": fbuf.samplers.Staleness(3, version="v")}, ValueError, "leaf 'v'; expected one of"),
        ({"path": None}, TypeError, "path is None; expected the path of a folder"),
    ]
    for settings, kind, words in wrong:
        for data in (bad(), iter([bad()])):
            raises(kind, words, oracle.from_arrays, data, **{"path": tmp_path / "a", **settings})
    pytest.raises(TypeError, lambda: oracle.from_arrays(3, path=tmp_path / "a")).match("data is a int")
    assert files(tmp_path) == []


def test_existing_files_are_not_modified(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.txt").write_text("mine")
    raises(FileExistsError, "already exists and is not", lambda: oracle.from_arrays(bad(), path=tmp_path / "a"))
    assert files(tmp_path) == ["a", "a/mine.txt"]
    oracle.from_arrays(bad(), path=tmp_path / "b", view=ROW)
    before = files(tmp_path)
    for data in (bad(), iter([bad()])):
        raises(FileExistsError, r"is a data set already. Open", oracle.from_arrays, data, path=tmp_path / "b")
    assert files(tmp_path) == before


def test_a_failure_removes_only_its_own_files(tmp_path):
    theirs = tmp_path / "project/pieces/7/notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    column = Column((), np.dtype(np.float32), lambda first, last: 1 / 0, 9)
    for path, left in ((tmp_path / "project", [theirs]), (tmp_path / "new", [])):
        raises(ZeroDivisionError, None, write_columns, "from_arrays", {"x": column}, 9, path, Settings(()))
        assert [p for p in path.rglob("*") if p.is_file()] == left
    assert not (tmp_path / "new").exists()


def test_streams_whose_rows_change_are_refused(tmp_path):
    data = bad()
    half = data["observations"].astype(np.float16)
    for other, words in (
        (data | {"observations": half}, r"from row 19 on leaf 'obs' is float16\[3\]"),
        (bad(actions=None), "leaf 'action' is missing"),
        (3, "data gives a int"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            oracle.from_arrays(iter([data, other]), path=tmp_path / "a", segment_rows=4)
        assert files(tmp_path) == []
    raises(ValueError, "there are no rows", lambda: oracle.from_arrays(iter([]), path=tmp_path / "a"))

    fails = (data if i == 0 else 1 / 0 for i in range(2))
    raises(ZeroDivisionError, None, oracle.from_arrays, fails, path=tmp_path / "a", segment_rows=4)
    assert files(tmp_path) == []
    empty = {n: x[:0] for n, x in data.items()}
    buffer, _ = oracle.from_arrays(iter([empty, data, empty, data, empty]), path=tmp_path / "a", view=ROW)
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

    buffer, _ = oracle.from_arrays(blocks(), path=tmp_path / "a", segment_rows=20, ends="terminated")
    assert buffer.capacity == 150

    def refilled():
        reward = np.zeros(5, np.float32)
        for i in range(30):
            reward[:] = i
            yield {"rewards": reward, "terminals": np.arange(5) == 4}

    oracle.from_arrays(refilled(), path=tmp_path / "b", segment_rows=20, ends="trajectory")
    with _dataset.DataSet.open(tmp_path / "b") as dataset:
        assert dataset.read_rows(0, 150)["reward"].tolist() == np.repeat(np.arange(30), 5).tolist()


def test_interrupted_work_is_resumed(tmp_path):
    data, path = flat(made(), following=True), tmp_path / "a"

    def stop(done, total):
        if done >= 12:
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, oracle.from_arrays, data, path=path, segment_rows=4, progress=stop)
    assert sorted(_dataset.committed(path)) == [0, 1]
    pytest.raises(FileNotFoundError, fbuf.datasets.open, path).match("not finished")
    other = data | {"rewards": data["rewards"] + (np.arange(19) == 1).astype(np.float32)}
    codec, ends = {"codec": {"obs": fbuf.storages.Zstd()}}, {"episode_end": ("terminated",)}
    for wrong, settings in ((other, {}), (data, {"segment_rows": 5}), (data, codec), (data, ends)):
        settings = {"path": path, "segment_rows": 4} | settings
        raises(FileExistsError, "segments of other rows or settings", oracle.from_arrays, wrong, **settings)
    settings, seen = {"path": path, "segment_rows": 4}, []
    raises(FileExistsError, "a stream, which cannot be", oracle.from_arrays, iter([data]), **settings)
    oracle.from_arrays(data, view=ROW, progress=lambda *at: seen.append(at), **settings)
    assert seen[0] == (8, 19) and seen[-1] == (19, 19)
    oracle.check_files(path, oracle.rows_of(made()))


def test_one_writer_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock.exclusive.__wrapped__, "__defaults__", (0.1,))
    with _lock.exclusive("another", tmp_path / "a"):
        for data in (bad(), iter([bad()])):
            raises(BlockingIOError, "the data set at", oracle.from_arrays, data, path=tmp_path / "a")
    assert files(tmp_path / "a") == []
    oracle.from_arrays(bad(), path=tmp_path / "a", view=ROW)
    assert "lock" not in files(tmp_path / "a")


def test_next_observations_are_compared_as_numbers():
    obs = np.array([[0.0, 1], [np.nan, 2], [0, 3], [5, np.nan], [6, 7], [8, 9]], np.float32)
    following = np.array([[np.nan, 2], [-0.0, 3], [5, 0], [6, 7], [0, 0], [0, 0]], np.float32)
    data = {"observations": obs, "next_observations": following, "terminals": [False] * 6, "timeouts": [False] * 6}
    buffer, state = fbuf.interop.from_arrays(data).into()
    assert buffer.rows(state).data["truncated"].tolist() == [False, False, True, False, True, True]
