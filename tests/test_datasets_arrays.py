"""Data sets from flat arrays: what D4RL and others have, streams and files, against plain-Python episodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _pieces
from fbuf.datasets._rows import Settings, write_columns
from fbuf.interop._source import Column
from tests.support import datasets_oracle as oracle

OBS = {"obs": ((3,), np.float32)}
ACTION = {"action": ((2,), np.float32)}
LENGTHS = (4, 1, 6, 3, 5)
ROW = fbuf.views.Row()  # where the view is not what is looked at: it compiles nothing


def made(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[oracle.Episode]:
    return oracle.episodes(seed, lengths, OBS, ACTION)


def flat(episodes: list[oracle.Episode], following: bool = False) -> dict[str, np.ndarray]:
    """As D4RL has it."""
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


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*")) if path.exists() else []


def test_transitions_without_the_last_observations(tmp_path: Path) -> None:
    episodes = made()
    buffer, state = fbuf.datasets.from_arrays(flat(episodes), path=tmp_path / "a", piece_rows=4)
    assert buffer.view == fbuf.views.Transition() and buffer.capacity == 19
    assert sorted(_pieces.committed(tmp_path / "a")) == [0, 1, 2, 3, 4]
    oracle.check_rows(buffer, state, oracle.rows_of(episodes, final=False))
    oracle.check_transitions(buffer, state, episodes, n=3, final=False)


def test_next_observations_are_kept_where_episodes_end(tmp_path: Path) -> None:
    episodes = made()
    data = flat(episodes, following=True)
    buffer, state = fbuf.datasets.from_arrays(data, path=tmp_path / "a", piece_rows=4, workers=3)
    assert buffer.view == fbuf.views.Transition(final_observation="final_obs")
    oracle.check_files(tmp_path / "a", oracle.rows_of(episodes))
    oracle.check_transitions(buffer, state, episodes, n=3, final=True)


def test_gaps_that_only_next_observations_show(tmp_path: Path) -> None:
    """As `d4rl.qlearning_dataset` gives it: rows that timed out are left out, and nothing says so."""
    episodes = made()
    data = flat(episodes, following=True)
    keep = ~data.pop("timeouts")
    data = {name: leaf[keep] for name, leaf in data.items()}
    fbuf.datasets.from_arrays(data, path=tmp_path / "a", view=ROW)
    left = []
    for e in episodes:
        steps = e.steps if e.terminated else e.steps - 1
        if steps:
            obs = {name: leaf[: steps + 1] for name, leaf in e.obs.items()}
            left.append(
                oracle.Episode(obs, {n: x[:steps] for n, x in e.action.items()}, e.reward[:steps], e.terminated)
            )
    oracle.check_files(tmp_path / "a", oracle.rows_of(left))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(2, 9), st.booleans(), st.integers(0, 5))
def test_any_lengths_pieces_and_streams(lengths: list[int], piece: int, following: bool, chunk: int) -> None:
    import tempfile

    episodes = made(tuple(lengths))
    data: Any = flat(episodes, following)
    expected = oracle.rows_of(episodes, final=following)
    if chunk:
        rows = len(data["rewards"])
        whole = data
        data = ({n: x[i : i + chunk] for n, x in whole.items()} for i in range(0, rows, chunk))
    with tempfile.TemporaryDirectory() as folder:
        fbuf.datasets.from_arrays(data, path=f"{folder}/a", piece_rows=piece, view=ROW)
        oracle.check_files(f"{folder}/a", expected)
        sizes = [info.rows for info in _pieces.committed(f"{folder}/a").values()]
    assert sizes[:-1] == [piece] * (len(sizes) - 1) and 0 < sizes[-1] <= piece


def test_nested_other_and_small_leaves(tmp_path: Path) -> None:
    data = {
        "observations": {"image": np.arange(5 * 400, dtype=np.uint8).reshape(5, 20, 20), "goal": jnp.arange(5)},
        "actions": np.arange(5, dtype=np.int64),
        "rewards": [1, 2, 3, 4, 5],
        "dones": np.array([0, 1, 0, 0, 0], np.float32),
        "infos": {"qpos": np.ones((5, 2), np.float16)},
    }
    with pytest.raises(ValueError, match=r"no leaf says where episodes end.*episode_end=\('done',\)"):
        fbuf.datasets.from_arrays(data, path=tmp_path / "a")
    settings = {"episode_end": ("dones",), "metadata": {"by": "me"}}
    buffer, state = fbuf.datasets.from_arrays(data, path=tmp_path / "a", **settings, view=ROW)
    rows = buffer.rows(state).data
    assert rows["truncated"].tolist() == [False, True, False, False, True] and not rows["terminated"].any()
    assert rows["action"].dtype == np.int32 and rows["infos"]["qpos"].dtype == np.float16
    assert np.array_equal(rows["obs"]["image"], data["observations"]["image"])
    assert fbuf.datasets.info(tmp_path / "a").meta["by"] == "me"
    fields = {"dones": "terminated", "actions": "action"}
    buffer, _ = fbuf.datasets.from_arrays(data, path=tmp_path / "b", fields=fields)
    assert buffer.view == ROW
    ended = np.arange(5) == 1
    expected = {"action": data["actions"], "terminated": ended, "truncated": np.arange(5) == 4}
    oracle.check_files(tmp_path / "b", expected)
    codec = {"obs/image": fbuf.storages.Raw()}
    fbuf.datasets.from_arrays(data, path=tmp_path / "c", episode_end=(), codec=codec, view=ROW)
    with _pieces.DataSet.open(tmp_path / "c") as dataset:
        assert dataset.read_rows(0, 5)["truncated"].tolist() == [False] * 4 + [True]
        assert dataset.schema["obs/image"].codec is None


def test_memory_maps_and_groups_are_read_in_slices(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    episodes = made()
    data = flat(episodes)
    expected = oracle.rows_of(episodes, final=False)
    mapped = np.memmap(tmp_path / "obs", np.float32, "w+", shape=data["observations"].shape)
    mapped[:] = data["observations"]
    fbuf.datasets.from_arrays(data | {"observations": mapped}, path=tmp_path / "a", view=ROW)
    oracle.check_files(tmp_path / "a", expected)
    with h5py.File(tmp_path / "d4rl.hdf5", "w") as file:
        for name, leaf in data.items():
            file[f"offline/{name}"] = leaf
        file["offline/metadata/algorithm"] = "SAC"
        file["offline/metadata/weight"] = np.zeros((3, 3), np.float32)
    names = ["observations", "actions", "rewards", "terminals", "timeouts"]
    with h5py.File(tmp_path / "d4rl.hdf5") as file:
        group = file["offline"]
        with pytest.raises(ValueError, match=r"'metadata/algorithm' is a scalar"):
            fbuf.datasets.from_arrays(group, path=tmp_path / "b")
        fbuf.datasets.from_arrays(group, path=tmp_path / "b", fields=names, piece_rows=5, workers=2, view=ROW)
        oracle.check_files(tmp_path / "b", expected)
    there = {f"offline/{n}": n for n in names}
    with pytest.raises(ValueError, match=r"Leave it out: fields=\['offline/"):
        fbuf.datasets.from_arrays(tmp_path / "d4rl.hdf5", path=tmp_path / "c")
    with pytest.raises(ValueError, match="no leaf says where"):
        fbuf.datasets.from_arrays(tmp_path / "d4rl.hdf5", path=tmp_path / "c", fields=list(there))
    known = {"observations": "obs", "actions": "action", "rewards": "reward", "terminals": "terminated"}
    fields = {t: known.get(n, "truncated") for t, n in there.items()}
    fbuf.datasets.from_arrays(tmp_path / "d4rl.hdf5", path=tmp_path / "c", fields=fields, view=ROW)
    oracle.check_files(tmp_path / "c", expected)


def test_npz(tmp_path: Path) -> None:
    episodes = made()
    np.savez(tmp_path / "a.npz", **flat(episodes, following=True))
    fbuf.datasets.from_arrays(tmp_path / "a.npz", path=tmp_path / "a", piece_rows=7, view=ROW)
    oracle.check_files(tmp_path / "a", oracle.rows_of(episodes))
    with pytest.raises(ValueError, match="expected .npz, .h5 or .hdf5"):
        fbuf.datasets.from_arrays(tmp_path / "a.csv", path=tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        fbuf.datasets.from_arrays(tmp_path / "missing.npz", path=tmp_path / "b")


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_files_that_an_export_wrote(tmp_path: Path, suffix: str) -> None:
    """They name dtypes that their format lacks, and say whether rows come in lanes."""
    pytest.importorskip("h5py")
    rows = {"obs": np.arange(6).astype(jnp.bfloat16), "done": np.arange(6) == 5}
    fbuf.interop.to_file(tmp_path / f"one{suffix}", *fbuf.interop.from_arrays(rows))
    buffer, state = fbuf.datasets.from_arrays(tmp_path / f"one{suffix}", path=tmp_path / "a", episode_end=("done",))
    assert buffer.rows(state).data["obs"].dtype == jnp.bfloat16
    oracle.check_files(tmp_path / "a", rows | {"terminated": np.zeros(6, bool), "truncated": rows["done"]})
    lanes = {name: leaf.reshape(3, 2) for name, leaf in rows.items()}
    fbuf.interop.to_file(tmp_path / f"two{suffix}", *fbuf.interop.from_arrays(lanes, lanes=2))
    with pytest.raises(ValueError, match=r"has rows of 2 lanes; expected one stream, \[N, ...\]"):
        fbuf.datasets.from_arrays(tmp_path / f"two{suffix}", path=tmp_path / "b")


def bad(**change: Any) -> dict[str, Any]:
    data: dict[str, Any] = dict(flat(made()))
    for name, value in change.items():
        if value is None:
            del data[name]
        else:
            data[name] = value
    return data


NAN = np.where(np.arange(19) == 7, np.nan, 1).astype(np.float32)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        bad(rewards=np.ones(18, np.float32)),
        ValueError,
        r"leaf 'rewards' has 18 rows, but 'observations' has 19.*fields=\[",
    ),
    (bad(rewards=NAN), ValueError, "leaf 'reward' is nan in row 7"),
    (bad(rewards=np.ones(19)), TypeError, r"leaf 'reward' is float64.*dtypes=\{'reward': 'float32'\}"),
    (bad(words=np.array(["a"] * 19)), ValueError, "leaf 'words' is <U1; expected plain numbers"),
    (bad(things=np.array([None] * 19)), ValueError, "leaf 'things' is object; expected plain numbers"),
    (bad(lists=[[1], [2, 3]]), ValueError, "leaf 'lists' is not an array"),
    (bad(terminals=np.full(19, 2)), ValueError, "leaf 'terminated' is 2 in row 0; expected 0 or 1"),
    (bad(terminals=np.zeros((19, 1), bool)), ValueError, r"leaf 'terminated' has shape .*; expected \[N\]"),
    (bad(terminated=np.zeros(19, bool)), ValueError, "'terminals' and 'terminated' would be the leaves"),
    (bad(observation={"a": np.zeros(19, np.float32)}), ValueError, "would be the leaves 'obs' and 'obs/a'"),
    (
        bad(next_observations=np.zeros((19, 4), np.float32)),
        ValueError,
        "expected next observations like the observations",
    ),
    (bad(terminals=None, timeouts=None), ValueError, "no leaf says where episodes end"),
    ({"a": {"b": np.zeros(3)}, "a/b": np.ones(3)}, ValueError, "two leaves have the name 'a/b'"),
    (bad(gamma=0.99), ValueError, "leaf 'gamma' is a scalar"),
    ({name: leaf[:0] for name, leaf in bad().items()}, ValueError, "there are no rows"),
    ({}, ValueError, "there are no"),
    ({1: np.zeros(3)}, TypeError, "a dict has the key 1"),
]


@pytest.mark.parametrize(("data", "kind", "words"), WRONG, ids=[words[:30] for _, _, words in WRONG])
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
def test_wrong_data_is_refused_and_leaves_nothing(
    tmp_path: Path, data: Any, kind: type[Exception], words: str, stream: bool
) -> None:
    with pytest.raises(kind, match=words):
        fbuf.datasets.from_arrays(iter([data]) if stream else data, path=tmp_path / "a")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"piece_rows": 0}, ValueError, "piece_rows is 0"),
        ({"workers": -1}, ValueError, "workers is -1"),
        ({"episode_end": "dones"}, TypeError, r"episode_end=\('dones',\)"),
        ({"episode_end": ("dones",)}, ValueError, "episode_end has 'dones', but rows have"),
        ({"fields": "obs"}, TypeError, r"fields=\('obs',\)"),
        ({"fields": ["obs"]}, ValueError, "fields has 'obs', which is not there"),
        ({"dtypes": {"observations": "float16"}}, ValueError, r"dtypes has 'observations', but leaves are obs"),
        ({"codec": {"odd": fbuf.storages.Zstd()}}, ValueError, "codec names 'odd'"),
        ({"metadata": {"a": object()}}, TypeError, "metadata is no JSON"),
        ({"view": fbuf.views.Transition}, TypeError, "view is the class Transition"),
        ({"sampler": 3}, TypeError, "sampler is 3"),
        ({"view": fbuf.views.Transition(observation="pixels")}, ValueError, "observation is 'pixels', but rows have"),
        ({"sampler": fbuf.samplers.Staleness(3, version="v")}, ValueError, "leaf 'v', but rows have"),
        ({"path": None}, TypeError, "path is None; expected the path of a folder"),
    ],
)
def test_wrong_settings(tmp_path: Path, given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        fbuf.datasets.from_arrays(bad(), **{"path": tmp_path / "a", **given})
    with pytest.raises(kind, match=words):
        fbuf.datasets.from_arrays(iter([bad()]), **{"path": tmp_path / "a", **given})
    with pytest.raises(TypeError, match="data is a int"):
        fbuf.datasets.from_arrays(3, path=tmp_path / "a")
    assert files(tmp_path) == []


def test_numbers_that_are_stored_in_another_way(tmp_path: Path) -> None:
    def refused(**data: Any) -> str:
        with pytest.raises(ValueError, match="from_arrays: leaf") as told:
            fbuf.datasets.from_arrays(data, path=tmp_path / "a", episode_end=())
        return str(told.value)

    assert "expected plain numbers, or booleans. Give x.astype('float32'). Leave it out: fields=['b']." in refused(
        a=np.zeros(3, ">f4"), b=np.zeros(3, np.int32)
    )
    torch = pytest.importorskip("torch")
    assert refused(a=torch.zeros(3)).endswith("is torch.float32; expected plain numbers, or booleans. Give x.numpy().")


def test_a_single_step(tmp_path: Path) -> None:
    buffer, state = fbuf.datasets.from_arrays({name: leaf[:1] for name, leaf in bad().items()}, path=tmp_path / "a")
    assert buffer.view == ROW and buffer.rows(state).data["truncated"].tolist() == [True]
    with pytest.raises(
        ValueError, match=r"looks at 2 rows at a time, but the data set has 1. Use a view of fewer rows"
    ):
        fbuf.datasets.open(tmp_path / "a", view=fbuf.views.Transition())


def test_what_lies_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        fbuf.datasets.from_arrays(bad(), path=tmp_path / "a")
    assert files(tmp_path) == ["a", "a/mine.txt"]
    fbuf.datasets.from_arrays(bad(), path=tmp_path / "b", view=ROW)
    before = files(tmp_path)
    for data in (bad(), iter([bad()])):
        with pytest.raises(FileExistsError, match=r"is a data set already. Open it: fbuf.datasets.open\("):
            fbuf.datasets.from_arrays(data, path=tmp_path / "b")
    assert files(tmp_path) == before


def test_a_failure_removes_nothing_of_others(tmp_path: Path) -> None:
    def broken(first: int, last: int) -> np.ndarray:
        raise OSError("the disk of the source fails")

    theirs = tmp_path / "project/pieces/7/notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    column = Column((), np.dtype(np.float32), broken, 9)
    for path, left in ((tmp_path / "project", [theirs]), (tmp_path / "new", [])):
        with pytest.raises(OSError, match="disk of the source"):
            write_columns({"x": column}, path, Settings(None, (), None, None, None), {}, 0, None)
        assert [p for p in path.rglob("*") if p.is_file()] == left
    assert not (tmp_path / "new").exists()


def test_streams_of_other_rows_are_refused(tmp_path: Path) -> None:
    data = bad()
    for other, words in (
        (
            data | {"observations": data["observations"].astype(np.float16)},
            r"from row 19 on leaf 'obs' is float16\[3\]",
        ),
        ({n: x for n, x in data.items() if n != "actions"}, "leaf 'action' is missing"),
        (3, "data gives a int"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            fbuf.datasets.from_arrays(iter([data, other]), path=tmp_path / "a", piece_rows=4)
        assert files(tmp_path) == []
    with pytest.raises(ValueError, match="there are no rows"):
        fbuf.datasets.from_arrays(iter([]), path=tmp_path / "a")

    def fails() -> Iterator[Any]:
        yield data
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        fbuf.datasets.from_arrays(fails(), path=tmp_path / "a", piece_rows=4)
    assert files(tmp_path) == []
    empty = {n: x[:0] for n, x in data.items()}
    buffer, _ = fbuf.datasets.from_arrays(iter([empty, data, empty, data, empty]), path=tmp_path / "a", view=ROW)
    assert buffer.capacity == 38


def test_a_stream_is_not_held(tmp_path: Path) -> None:
    """At most two dicts are alive at a time."""
    import weakref

    alive: list[weakref.ref[Any]] = []

    class Watched(np.ndarray):
        pass

    def blocks() -> Iterator[Any]:
        for i in range(30):
            obs = np.zeros((5, 3), np.float32).view(Watched)
            alive.append(weakref.ref(obs))
            assert sum(ref() is not None for ref in alive) <= 2
            yield {"observations": obs, "rewards": np.full(5, i, np.float32), "terminals": np.arange(5) == 4}
            del obs

    buffer, _ = fbuf.datasets.from_arrays(blocks(), path=tmp_path / "a", piece_rows=20)
    assert buffer.capacity == 150

    def refilled() -> Iterator[Any]:
        reward = np.zeros(5, np.float32)
        for i in range(30):
            reward[:] = i
            yield {"rewards": reward, "terminals": np.arange(5) == 4}

    fbuf.datasets.from_arrays(refilled(), path=tmp_path / "b", piece_rows=20)
    with _pieces.DataSet.open(tmp_path / "b") as dataset:
        assert dataset.read_rows(0, 150)["reward"].tolist() == [i for i in range(30) for _ in range(5)]


def test_interrupted_work_goes_on(tmp_path: Path) -> None:
    data, path = flat(made(), following=True), tmp_path / "a"

    def stop(done: int, total: int) -> None:
        if done >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fbuf.datasets.from_arrays(data, path=path, piece_rows=4, progress=stop)
    assert sorted(_pieces.committed(path)) == [0, 1]
    with pytest.raises(FileNotFoundError, match="not finished"):
        fbuf.datasets.open(path)
    other = data | {"rewards": data["rewards"] + 1}
    for wrong, settings in ((other, {}), (data, {"piece_rows": 5}), (data, {"codec": {"obs": fbuf.storages.Zstd()}})):
        with pytest.raises(FileExistsError, match="unfinished work on other rows, or with other settings"):
            fbuf.datasets.from_arrays(wrong, path=path, **({"piece_rows": 4} | settings))
    with pytest.raises(FileExistsError, match="rows that come as a stream cannot be resumed"):
        fbuf.datasets.from_arrays(iter([data]), path=path, piece_rows=4)
    seen: list[tuple[int, int]] = []
    fbuf.datasets.from_arrays(
        data, path=path, piece_rows=4, view=ROW, progress=lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (8, 19) and seen[-1] == (19, 19)
    oracle.check_files(path, oracle.rows_of(made()))


def test_interrupted_work_goes_on_with_the_same_rows_only(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > 100:
            raise KeyboardInterrupt

    data = {"x": np.arange(200)}
    with pytest.raises(KeyboardInterrupt):
        fbuf.datasets.from_arrays(data, path=tmp_path / "a", episode_end=(), piece_rows=100, progress=stop)
    mended = {"x": np.where(data["x"] == 1, 0, data["x"])}  # one row of the first piece
    with pytest.raises(FileExistsError, match="unfinished work on other rows"):
        fbuf.datasets.from_arrays(mended, path=tmp_path / "a", episode_end=(), piece_rows=100)


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fbuf.datasets import _lock

    monkeypatch.setattr(_lock.held.__wrapped__, "__defaults__", (0.1,))  # type: ignore[attr-defined]
    with _lock.held("another", tmp_path / "a"):
        for data in (bad(), iter([bad()])):
            with pytest.raises(BlockingIOError, match="from_arrays: the data set at"):
                fbuf.datasets.from_arrays(data, path=tmp_path / "a")
    assert files(tmp_path / "a") == []
    fbuf.datasets.from_arrays(bad(), path=tmp_path / "a", view=ROW)
    assert "lock" not in files(tmp_path / "a")


def test_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fbuf.datasets.from_arrays(bad(), path=tmp_path / "a", view=ROW, progress=True, piece_rows=5)
    assert "19/19" in capsys.readouterr().err
    fbuf.datasets.from_arrays(iter([bad()]), path=tmp_path / "b", view=ROW, progress=True, piece_rows=5)
    assert "from_arrays: 19 rows" in capsys.readouterr().err
    seen: list[tuple[int, int]] = []
    fbuf.datasets.from_arrays(
        iter([bad()]), path=tmp_path / "c", view=ROW, piece_rows=5, progress=lambda *told: seen.append(told)
    )
    assert seen[0] == (5, 0) and seen[-1] == (19, 19)


def test_a_failure_in_one_thread_ends_the_others(tmp_path: Path) -> None:
    class Failing:
        shape, dtype = (1000, 3), np.dtype(np.float32)

        def __getitem__(self, rows: slice) -> np.ndarray:
            if rows.start >= 500:
                raise OSError("a bad sector")
            return np.zeros((rows.stop - rows.start, 3), np.float32)

    data = {"observations": Failing(), "terminals": np.zeros(1000, bool)}
    with pytest.raises(OSError, match="a bad sector"):
        fbuf.datasets.from_arrays(data, path=tmp_path / "a", piece_rows=10, workers=3)
    assert len(_pieces.committed(tmp_path / "a")) <= 55  # those after it were never begun
    with pytest.raises(FileNotFoundError, match="not finished"):
        fbuf.datasets.open(tmp_path / "a")


KILLED = """
import sys, time, numpy as np, fbuf
def told(done, total):
    print(done, flush=True)
    time.sleep(0.02)
rows = np.arange(4000 * 300, dtype=np.float32).reshape(4000, 300)
data = {"observations": rows, "terminals": np.arange(4000) % 7 == 0}
fbuf.datasets.from_arrays(data, path=sys.argv[1], piece_rows=100, workers=2, progress=told)
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    for wait in (400, 1700):
        command = [sys.executable, "-c", KILLED, str(tmp_path / "a")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) >= wait:
                    break
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(FileNotFoundError, match="not finished"):
            fbuf.datasets.open(tmp_path / "a")
    done = sum(piece.rows for piece in _pieces.committed(tmp_path / "a").values())
    assert done >= 1000
    rows = np.arange(4000 * 300, dtype=np.float32).reshape(4000, 300)
    seen: list[int] = []
    fbuf.datasets.from_arrays(
        {"observations": rows, "terminals": np.arange(4000) % 7 == 0},
        path=tmp_path / "a",
        piece_rows=100,
        view=ROW,
        progress=lambda now, total: seen.append(now),
    )
    assert seen[0] == done
    with _pieces.DataSet.open(tmp_path / "a") as dataset:
        assert np.array_equal(dataset.read_rows(0, 4000)["obs"], rows)


def test_default_pieces(tmp_path: Path) -> None:
    """No piece is larger than 512 MiB before compression; a broadcast array takes no memory."""
    obs = np.broadcast_to(np.zeros((1, 1024, 1024), np.uint8), (600, 1024, 1024))
    plan: list[int] = []

    def stop(done: int, total: int) -> None:
        plan.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fbuf.datasets.from_arrays(
            {"observations": obs, "terminals": np.zeros(600, bool)}, path=tmp_path / "a", progress=stop
        )
    assert plan[-1] <= 8  # rows of a block: some 8 MiB


def test_64_bits(tmp_path: Path) -> None:
    data = bad(actions=np.full(19, 2**40))
    with pytest.raises(ValueError, match="hold values that int32 cannot"):
        fbuf.datasets.from_arrays(data, path=tmp_path / "a")
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        buffer, state = fbuf.datasets.from_arrays(data, path=tmp_path / "b")
        assert buffer.rows(state).data["action"].tolist() == [2**40] * 19


def test_import_needs_nothing() -> None:
    optional = "h5py", "pyarrow", "minari", "PIL", "tqdm", "torch"
    code = f"import sys, fbuf.datasets; print(sorted(set({optional}) & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
