"""Functions over rows and windows of data sets give what a loop in numpy gives, in order, also after an interruption."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._formats import dataset as _dataset
from fbuf.datasets._preprocess import Program
from tests.support import datasets_oracle as oracle
from tests.support.paths import ROOT
from tests.support.refusals import raises
from tests.support.tables import by_tier

OBS = {"obs/place": ((3,), np.float32), "obs/goal": ((2,), np.float32), "obs/frame": ((20, 20), np.uint8)}
ACTION = {"action": ((2,), np.float32)}
LENGTHS = (4, 1, 6, 3, 5)
EPISODES = oracle.episodes(0, LENGTHS, OBS, ACTION)


@pytest.fixture(scope="module")
def maze(tmp_path_factory):
    path = tmp_path_factory.mktemp("maze") / "maze"
    rows = oracle.rows_of(EPISODES, final=False)
    rows |= {"next_" + name: np.concatenate([e.obs[name][1:] for e in EPISODES]) for name in OBS}
    rows["reward"] = rows["reward"].astype(np.float32)
    oracle.from_arrays(rows, path=path, segment_rows=4)
    return path


def read(path):
    with _dataset.DataSet.open(path) as dataset:
        return dataset.read_rows(0, dataset.rows)


def same(row):
    return row


def select(row):
    return {"action": row["action"], "obs": {"place": row["obs"]["place"]}}


@pytest.mark.parametrize(
    ("workers", "limit", "sizes"), by_tier((0, np.int64(7), [5, 2]), more=[(2, 1000, [5, 5, 5, 4])])
)
def test_selected_leaves_are_copied(maze, tmp_path, workers, limit, sizes):
    dest, settings = tmp_path / "a", {"segment_rows": 5, "batch_size": 2, "workers": workers, "limit": limit}
    buffer, _ = fbuf.datasets.preprocess(maze, select, dest=dest, **settings)
    before, after = read(maze), read(dest)
    assert sorted(after) == ["action", "obs/place", "terminated", "truncated"] and buffer.view == fbuf.views.Row()
    assert all(np.array_equal(after[name], before[name][: sum(sizes)]) for name in after)
    assert [segment.rows for segment in _dataset.committed(dest).values()] == sizes


def test_dtypes_and_structures_are_those_of_the_function(maze, tmp_path):
    def odd(row):
        return {
            "half": row["obs"]["place"].astype(jnp.bfloat16),
            "several": (row["reward"] > 0, [row["obs"]["frame"].mean(dtype=jnp.float32)]),
            "constant": 3,
            "nothing": None,
            "truncated": row["terminated"],
        }

    buffer, state = fbuf.datasets.preprocess(maze, odd, dest=tmp_path / "a", keep=("reward",))
    rows, before = buffer.rows(state).data, read(maze)
    assert rows["half"].dtype == jnp.bfloat16 and rows["constant"].tolist() == [3] * 19 and rows["nothing"] is None
    assert np.array_equal(rows["several"][0], before["reward"] > 0)
    assert np.allclose(rows["several"][1][0], before["obs/frame"].mean(axis=(1, 2)))
    assert np.array_equal(rows["reward"], before["reward"]) and "terminated" not in rows
    assert np.array_equal(rows["truncated"], before["terminated"])  # the function's own, not the one kept


@pytest.mark.more
def test_windows_of_transitions(maze, tmp_path):
    view = fbuf.views.Transition(n_step=3, gamma=0.9, final_observation="final_obs")

    def simple(step):
        return {n: step[n] for n in ("reward", "discount", "action")} | {"next_place": step["next_obs"]["place"]}

    expected = oracle.transitions(EPISODES, 3, 0.9, final=True)
    rows = oracle.rows_of(EPISODES)
    settings = {"view": view, "batch_size": 4, "segment_rows": 6}
    for data, name in ((maze, "a"), (fbuf.datasets.open(maze), "b")):
        buffer, state = fbuf.datasets.preprocess(data, simple, dest=tmp_path / name, **settings)
        found = buffer.rows(state).data
        assert buffer.capacity == len(expected) == 19 and buffer.view == fbuf.views.Row()
        assert sorted(found) == ["action", "discount", "next_place", "reward"]
        for i, (row, wanted) in enumerate(expected.items()):
            assert np.allclose(found["reward"][i], wanted["reward"], rtol=1e-5)
            assert np.allclose(found["discount"][i], wanted["discount"])
            assert np.array_equal(found["action"][i], rows["action"][row])
            assert np.array_equal(found["next_place"][i], wanted["next_obs"]["obs/place"])


def test_rows_of_a_live_buffer_are_written_oldest_first(tmp_path):
    ring, rows = fbuf.Buffer(4), {"t": np.arange(6, dtype=np.int32)}
    held = ring.extend(ring.init({"t": 0}), rows)
    fbuf.datasets.preprocess((ring, held), same, dest=tmp_path / "b", view=fbuf.views.Row())
    assert read(tmp_path / "b")["t"].tolist() == [2, 3, 4, 5]


def test_a_state_of_a_data_set_that_was_replaced_is_refused(tmp_path):
    data = {"x": np.arange(9, dtype=np.int32)}
    opened = oracle.from_arrays(data, path=tmp_path / "a", episode_end=())
    for name in ("dataset.json", "pieces"):
        (tmp_path / "a" / name).rename(tmp_path / name)
    again = oracle.from_arrays({"x": data["x"] + 1}, path=tmp_path / "a", episode_end=())
    raises(ValueError, r"has changed since this state was", fbuf.datasets.preprocess, opened, same, dest=tmp_path / "b")
    assert not (tmp_path / "b").exists()
    elsewhere = fbuf.Buffer(9).init({"x": 0})
    words = "DataSet: another storage made this state"
    raises(TypeError, words, fbuf.datasets.preprocess, (again[0], elsewhere), same, dest=tmp_path / "b")
    fbuf.datasets.preprocess(again, same, dest=tmp_path / "b")
    assert read(tmp_path / "b")["x"].tolist() == list(range(1, 10))


def test_rows_of_any_last_batch_share_one_program(maze, tmp_path):
    traced = []

    def count(row):
        traced.append(1)
        return {"obs": row["obs"]["place"]}

    fbuf.datasets.preprocess(maze, count, dest=tmp_path / "a", batch_size=4, segment_rows=7)
    assert len(traced) == 4  # two check it, one gives shapes and one the program
    assert np.array_equal(read(tmp_path / "a")["obs"], read(maze)["obs/place"])


LEAKED = []
STATE = np.random.default_rng(0)


def _leaks(row):
    LEAKED.append(row["reward"] + 1)
    return {"reward": row["reward"]}


WRONG = [
    (3, TypeError, "fn is a int; expected a function of one row"),
    (lambda row: row["reward"], TypeError, "fn returns a .* for a row; expected a dict of arrays"),
    (lambda row: [row["reward"]], TypeError, "fn returns a list for a row"),
    (lambda row: None, TypeError, "fn returns a NoneType for a row"),
    (lambda row: {}, TypeError, "fn returns no leaves for a row; .* No row can be dropped"),
    (lambda row: {"a": "text"}, TypeError, "fn returns 'a' as a str; expected arrays"),
    (lambda row: {"a": object()}, TypeError, "fn returns 'a' as a object"),
    (lambda row: {"a": jax.random.key(0)}, TypeError, "fn returns leaf 'a' as key<fry>; expected numbers"),
    (lambda row: {"a": row["reward"] + STATE.normal()}, ValueError, "fn differs when traced again"),
    (lambda row: {"a": row["reward"] + time.perf_counter_ns() % 2**20}, ValueError, "fn differs when traced again"),
    (_leaks, ValueError, "fn leaks a traced value"),
    (lambda row: {"a": row["missing"]}, KeyError, "missing"),
]


@pytest.mark.parametrize(("fn", "kind", "words"), WRONG)
def test_invalid_functions_are_refused_and_leave_nothing(maze, tmp_path, fn, kind, words):
    LEAKED.clear()
    pytest.raises(kind, lambda: fbuf.datasets.preprocess(maze, fn, dest=tmp_path / "a")).match(words)
    assert list(tmp_path.iterdir()) == []


def test_invalid_destinations_are_refused(maze, tmp_path):
    for dest, words in (
        (maze, "the source itself"),
        (maze / "pieces" / "new", "expected neither within the other"),
        (maze.parent, "expected neither within the other"),
        (maze / ".." / "maze", "the source itself"),
    ):
        pytest.raises(ValueError, fbuf.datasets.preprocess, maze, same, dest=dest).match(words)
    (tmp_path / "link").symlink_to(maze)
    opened, preprocess = fbuf.datasets.open(maze), fbuf.datasets.preprocess
    raises(ValueError, "the source itself", preprocess, opened, same, dest=tmp_path / "link")
    preprocess(maze, select, dest=tmp_path / "a")
    raises(FileExistsError, "is a data set already", preprocess, maze, select, dest=tmp_path / "a")
    raises(FileNotFoundError, "there is no data set", preprocess, tmp_path / "none", select, dest=tmp_path / "b")


def test_invalid_arguments_are_refused_and_leave_nothing(maze, tmp_path):
    lanes, empty = fbuf.Buffer(4, lanes=2), fbuf.Buffer(4)
    two, none = lanes.init({"t": 0}), empty.init({"t": 0})
    wrong = [
        ({"limit": 0}, ValueError, "limit is 0"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"sampler": 3}, TypeError, "sampler is 3"),
        ({"sampler": fbuf.samplers.Staleness(3, version="v")}, ValueError, "leaf 'v'; expected one of"),
        ({"dest": None}, TypeError, "dest is None; expected the path of a folder"),
        ({"data": None}, TypeError, r"data is None; expected the path of a folder, or \(buffer, state\)"),
        ({"workers": -1}, ValueError, "workers is -1"),
        ({"keep": "reward"}, TypeError, r"keep=\('reward',\)"),
        ({"keep": ("rewards",)}, ValueError, "keep has 'rewards', but rows have"),
        ({"view": fbuf.views.Sequence(7, autoreset="same_step")}, ValueError, "finds no window to draw"),
        ({"view": fbuf.views.Transition(autoreset="same_step"), "keep": ("obs",)}, ValueError, "keep has 'obs'"),
        ({"data": (lanes, two)}, ValueError, "lanes=2; expected one stream"),
        ({"data": (two, lanes)}, TypeError, r"expected \(buffer, state\), or a path"),
        ({"data": (empty, none)}, ValueError, "there is nothing to write"),
    ]
    for settings, kind, words in wrong:
        settings = {"data": maze, "fn": same, "dest": tmp_path / "a", **settings}
        raises(kind, words, fbuf.datasets.preprocess, **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.more
def test_interrupted_work_resumes_with_the_same_function_only(maze, tmp_path):
    def stop(done, total):
        if done >= 11:
            raise KeyboardInterrupt

    def written(name, by, **settings):
        function = lambda row: {"reward": row["reward"] * by}  # noqa: E731
        fbuf.datasets.preprocess(maze, function, dest=tmp_path / name, **({"segment_rows": 5} | settings))
        return read(tmp_path / name)["reward"] / read(maze)["reward"]

    for name in "ab":
        raises(KeyboardInterrupt, None, written, name, 2.0, batch_size=2, progress=stop)
    assert sorted(_dataset.committed(tmp_path / "a")) == [0, 1]
    for by, settings in ((3.0, {}), (2.0, {"segment_rows": 4}), (2.0, {"keep": ()})):
        raises(FileExistsError, "segments of other rows or settings", written, "a", by, **settings)
    seen = []
    assert (written("a", 2.0, progress=lambda done, total: seen.append(done)) == 2).all() and seen[0] == 10
    assert np.allclose(written("b", 3.0, resume=False), 3)


def test_marks_differ_where_constants_do():
    row = {"x": jax.ShapeDtypeStruct((2000,), np.float32)}

    def mark(place, at):
        constant = np.where(np.arange(2000) == at, 7, 0).astype(np.float32)

        def plain(x):
            return x + constant

        def looped(x):
            return jax.lax.fori_loop(0, 3, lambda i, carry: jax.jit(plain)(carry), x)

        step = {"plain": plain, "jitted": jax.jit(plain), "looped": looped}[place]
        return Program(lambda row: {"x": step(row["x"])}, row, (), None).mark

    for place in ("plain", "jitted", "looped"):
        assert mark(place, 1000) == mark(place, 1000) != mark(place, 1001), place

    def called(factor):  # by a callback
        host = lambda x: jax.pure_callback(lambda x: x * factor, x, x, vmap_method="expand_dims")  # noqa: E731
        return Program(lambda row: {"x": jax.jit(host)(row["x"])}, row, (), None).mark

    assert called(2) != called(3)


@pytest.mark.more
def test_ends_of_a_buffer_are_kept_where_rows_follow_each_other(tmp_path):
    row = {"obs": np.zeros(2, np.float32), "reward": np.float32(0), "terminated": False, "truncated": False}
    rows = {name: np.zeros((6, *np.shape(leaf)), np.asarray(leaf).dtype) for name, leaf in row.items()}
    rows["terminated"] = np.arange(6) % 3 == 2
    for name, writer in (("steps", fbuf.writers.Ring()), ("drawn", fbuf.writers.Reservoir())):
        ring = fbuf.Buffer(6, writer=writer)
        held = ring.extend(ring.init(row), rows)

        def less(row):
            return {"obs": row["obs"], "reward": row["reward"]}

        buffer, state = fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / name)
        after = buffer.rows(state).data
        if name == "steps":
            assert np.array_equal(after["terminated"], rows["terminated"])
            assert buffer.view == fbuf.views.Transition(action=None, autoreset="same_step")
        else:
            assert sorted(after) == ["obs", "reward"] and buffer.view == fbuf.views.Row()
            other, _ = fbuf.datasets.preprocess((ring, held), lambda row: row, dest=tmp_path / "all")
            assert other.view == fbuf.views.Row()
            fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / "kept", keep=("terminated",))


N = 3000
ROWS = np.arange(N * 300, dtype=np.float32).reshape(N, 300)


def from_arrays(folder, path, progress):
    data = {"observations": ROWS, "terminated": np.arange(N) % 7 == 0}
    oracle.from_arrays(data, path=path, segment_rows=100, workers=2, view=fbuf.views.Row(), progress=progress)


def preprocess(folder, path, progress):
    def same(row):
        return {"obs": row["obs"] + 0}

    if not (folder / "source").exists():
        oracle.from_arrays({"obs": ROWS}, path=folder / "source", episode_end=(), segment_rows=700)
    settings = {"segment_rows": 100, "batch_size": 25, "workers": 2, "progress": progress}
    fbuf.datasets.preprocess(folder / "source", same, dest=path, **settings)


def tell(done, total):
    print(done, flush=True)
    sys.stdin.readline()  # the test says when to go on


PROGRAM = """
import importlib, sys
from pathlib import Path
folder, module = Path(sys.argv[2]), importlib.import_module(sys.argv[3])
getattr(module, sys.argv[1])(folder, folder / "made", module.tell)
"""


@pytest.mark.more
@pytest.mark.parametrize("write", [from_arrays, preprocess])
def test_killed_work_is_resumed(write, tmp_path):
    path = tmp_path / "made"
    for wait in (400, 1700):
        command = [sys.executable, "-c", PROGRAM, write.__name__, str(tmp_path), __name__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, text=True, bufsize=1, cwd=ROOT, **pipes) as process:
            while int(process.stdout.readline()) < wait:
                process.stdin.write("on\n")
            process.kill()
        pytest.raises(FileNotFoundError, fbuf.datasets.open, path).match("not finished")
    done = sum(segment.rows for segment in _dataset.committed(path).values())
    assert done >= 1000
    seen = []
    write(tmp_path, path, lambda now, total: seen.append(now))
    assert seen[0] == done
    with _dataset.DataSet.open(path) as dataset:
        assert np.array_equal(dataset.read_rows(0, N)["obs"], ROWS)
