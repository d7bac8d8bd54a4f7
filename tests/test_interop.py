"""Rows from plain arrays and files and back: every row, dtype and storage, in blocks; and files that are whole or absent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf.interop import _columns, _load, _read, _sink, _ted, from_arrays, from_file, to_file, to_ted
from fbuf.interop._source import DTYPES
from fbuf.storages import Compressed, Device, Host, Memmap

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = (".npz", ".h5")


def made(n: int, lanes: int | None = None) -> dict:
    """Rows of all kinds of leaves, each entry another."""
    lead = (n,) if lanes is None else (n, lanes)
    t = np.arange(np.prod(lead)).reshape(lead)
    return {
        "action": t.astype(np.int32),
        "done": t % 5 == 4,
        "next": {"obs": np.broadcast_to(t[..., None, None], (*lead, 4, 3)).astype(np.uint8)},
        "nothing": np.zeros((*lead, 0), np.float32),
        "x": (t * 0.5).astype(jnp.bfloat16),
    }


def held(buffer: fbuf.Buffer, state: fbuf.BufferState) -> dict[str, np.ndarray]:
    """Rows that are there, oldest first, by name; of lanes one after another, `[N, ...]`."""
    rows = buffer.rows(state)
    mask = np.asarray(rows.mask).reshape(len(rows.mask), -1).T
    leaves = fbuf._tree.named_leaves(rows.data)
    lead = 1 if buffer.lanes is None else 2
    flat = {n: np.asarray(x).reshape(*mask.T.shape, *x.shape[lead:]).swapaxes(0, 1) for n, x in leaves.items()}
    return {name: leaf[mask] for name, leaf in flat.items()}


def same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(got) == list(wanted)
    for name, leaf in wanted.items():
        assert got[name].dtype == leaf.dtype and got[name].shape == leaf.shape, name
        assert got[name].tobytes() == leaf.tobytes(), name


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks, and a last one that is short."""
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 100)
    monkeypatch.setattr(_read, "BLOCK_BYTES", 100)


# ------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    "storage",
    [
        Device(),
        Compressed(keys=("next",)),
        pytest.param(Host(), marks=pytest.mark.slow),
        pytest.param("memmap", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("lanes", [None, 3])
def test_arrays_fill_a_buffer_of_any_storage(storage, lanes, small_blocks, tmp_path):
    rows = made(17, lanes)
    storage = Memmap(str(tmp_path / "rows")) if storage == "memmap" else storage
    buffer = fbuf.Buffer(60, storage=storage, lanes=lanes)
    buffer, state = from_arrays(rows, buffer=buffer)
    flat = [
        x.reshape(17, lanes or 1, *x.shape[1 + (lanes is not None) :]).swapaxes(0, 1) for x in jax.tree.leaves(rows)
    ]
    names = list(fbuf._tree.named_leaves(rows))
    same(held(buffer, state), {n: x.reshape(17 * (lanes or 1), *x.shape[2:]) for n, x in zip(names, flat, strict=True)})
    assert all(int(v) == 0 for n, v in buffer.stats(state).items() if n.startswith("refused"))


def test_a_buffer_is_made_with_room_for_just_these_rows():
    buffer, state = from_arrays(made(12, 3), lanes=3)
    assert (buffer.capacity, buffer.lanes, int(buffer.size(state))) == (36, 3, 36)
    buffer, state = from_arrays({"x": np.zeros((0, 2), np.float32)})
    assert (buffer.capacity, int(buffer.size(state))) == (1, 0)
    assert from_arrays({"x": np.zeros(3, np.float32)}, capacity=10)[0].capacity == 10


def test_the_structure_of_the_rows_stays():
    Row = namedtuple("Row", "obs action")
    buffer, state = from_arrays(Row(np.ones((3, 2), np.float32), np.arange(3, dtype=np.int32)))
    rows = buffer.rows(state).data
    assert type(rows) is Row and rows.action.tolist() == [0, 1, 2]


def test_fields_rename_and_leave_out():
    buffer, state = from_arrays(made(5), fields={"next/obs": "obs", ("action",): ("a", "b")})
    rows = buffer.rows(state).data
    assert rows["obs"].shape == (5, 4, 3) and rows["a"]["b"].tolist() == [0, 1, 2, 3, 4] and set(rows) == {"obs", "a"}


def test_newest_rows_only(small_blocks):
    buffer, state = from_arrays(made(17), newest=4)
    assert buffer.capacity == 4 and held(buffer, state)["action"].tolist() == [13, 14, 15, 16]


def test_priorities_come_along():
    priority = np.array([1.0, 4.0, 9.0, 0.25], np.float32)
    buffer = fbuf.prioritized(8, alpha=0.5, eps=0.0, normalize=None)
    buffer, state = from_arrays({"t": np.arange(4, dtype=np.int32)}, buffer=buffer, priority=priority)
    _, batch = buffer.sample(state, jax.random.key(0), 64)
    leaf = np.sqrt(priority)
    np.testing.assert_allclose(batch.probability, (leaf / leaf.sum())[np.asarray(batch.data["t"])], rtol=1e-5)


def test_priorities_where_a_view_decides_what_is_drawn(small_blocks):
    """An anchor's priority is that of its own row, also where rows come before it is one."""
    view = fbuf.views.Sequence(3, episode_end=("done",))
    buffer = fbuf.Buffer(40, lanes=2, view=view, sampler=fbuf.samplers.Prioritized(1.0, eps=0.0, normalize=None))
    n, priority = 15, np.arange(1.0, 31.0).reshape(15, 2)
    rows = {"t": np.arange(30, dtype=np.int32).reshape(n, 2), "done": np.zeros((n, 2), bool)}
    with pytest.warns(UserWarning, match="4 of 30 rows have a priority but are not drawn"):
        buffer, state = from_arrays(rows, buffer=buffer, priority=priority)
    assert int(buffer.stats(state)["refused_closed"]) == 0
    _, batch = buffer.sample(state, jax.random.key(1), 128)
    first = np.asarray(batch.data["t"])[:, 0]
    total = priority.reshape(-1)[: 2 * (n - 2)].sum()
    np.testing.assert_allclose(batch.probability, priority.reshape(-1)[first] / total, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"arrays": {}}, ValueError, "no leaves"),
        (
            {"arrays": {"a": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)}},
            ValueError,
            "'b' has 4 rows, but 'a' has 3",
        ),
        ({"arrays": {"a": np.float32(0)}}, ValueError, r"shape \[\]; expected \[N"),
        ({"lanes": 2}, ValueError, r"expected \[N, 2, ...\]"),
        ({"fields": "flat"}, TypeError, "expected a dict"),
        ({"fields": ["b"]}, ValueError, "has 'b', which is not there; expected some of: a"),
        ({"fields": {"a": "c"}, "dtypes": {"a": "int32"}}, ValueError, "dtypes has 'a', but leaves are c"),
        ({"dtypes": {"a": "object"}}, TypeError, "expected one of bool"),
        ({"dtypes": {"a": "float64"}}, TypeError, "expected one of bool"),
        ({"newest": -1}, ValueError, "newest is -1"),
        (
            {"buffer": fbuf.Buffer(3)},
            ValueError,
            "there are 4 rows, but the buffer holds 3. Use capacity=4, or .* newest=3",
        ),
        ({"buffer": fbuf.Buffer(4), "capacity": 4}, ValueError, "Drop capacity=4"),
        ({"priority": np.array([1, np.nan, 1, 1])}, ValueError, "not finite"),
        ({"arrays": {"a": np.zeros(3)}}, TypeError, "Say that it may be rounded: dtypes={'a': 'float32'}"),
        ({"arrays": {"a": np.array([0, 2**40])}}, ValueError, "rows 0 to 1 hold values that int32 cannot"),
        ({"dtypes": {"a": "uint8"}, "arrays": {"a": np.array([0.5], np.float32)}}, ValueError, "that uint8 cannot"),
        ({"arrays": {"a": np.array(["x"])}}, ValueError, "leaf 'a' is <U1; expected plain numbers"),
        ({"dtypes": {"a": "float16"}, "arrays": {"a": np.array([1e6], np.float32)}}, ValueError, "that float16 cannot"),
    ],
)
def test_what_does_not_fit_is_said(settings, error, match):
    with pytest.raises(error, match=match):
        from_arrays(**{"arrays": {"a": np.arange(4, dtype=np.float32)}} | settings)


@pytest.mark.parametrize("on_full", ["retire", pytest.param("refuse", marks=pytest.mark.slow)])
def test_a_storage_without_room_for_all_rows_is_said(on_full):
    frames = np.random.default_rng(0).integers(0, 255, (300, 12, 12), np.uint8)
    storage = fbuf.storages.Deduplicated(keys=("x",), block=(12, 12), blocks=160, on_full=on_full)
    with pytest.raises(ValueError, match=r"had room for 1\d\d of 300 rows only"):
        from_arrays({"x": frames}, buffer=fbuf.Buffer(400, storage=storage))
    if on_full == "retire":
        buffer, state = from_arrays({"x": frames[:100]}, buffer=fbuf.Buffer(400, storage=storage))
        assert np.array_equal(buffer.last(state, 100).data["x"], frames[:100])


@pytest.mark.parametrize("storage", [Memmap, Compressed])
def test_an_import_that_fails_leaves_no_store(storage: type, small_blocks: None, tmp_path: Path) -> None:
    """Half of the rows would look like all, and be in the way of the next try."""
    buffer = fbuf.Buffer(30, storage=storage(path=str(tmp_path / "rows")))

    class Torn:
        shape, dtype = (30, 4096), np.dtype(np.uint8)

        def __getitem__(self, rows: slice) -> np.ndarray:
            if rows.start > 10:
                raise OSError("the network went away")
            return np.zeros((rows.stop - rows.start, 4096), np.uint8)

    with pytest.raises(OSError, match="the network went away"):
        from_arrays({"x": Torn()}, buffer=buffer)
    assert not (tmp_path / "rows").exists()
    _, state = from_arrays({"x": np.ones((30, 4096), np.uint8)}, buffer=buffer)
    assert int(buffer.size(state)) == 30


def test_the_same_name_twice():
    with pytest.raises(ValueError, match="'x' and 'action' would be the leaves 'z' and 'z'"):
        from_arrays(made(3), fields={"x": "z", "action": "z"})


def test_casts_that_are_asked_for():
    arrays = {"a": np.array([0.1, 2.5]), "b": np.array([1, 2**31 - 1])}
    buffer, state = from_arrays(arrays, dtypes={"a": "float32"})
    rows = buffer.rows(state).data
    assert rows["a"].tolist() == [np.float32(0.1), 2.5] and rows["b"].dtype == jnp.int32 and rows["b"][1] == 2**31 - 1


def test_progress_is_told(small_blocks):
    told = []
    from_arrays({"a": np.zeros((10, 10), np.float32)}, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (10, 10) and len(told) > 3 and told == sorted(told)


# -------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("lanes", [None, 2])
def test_rows_come_back(suffix, lanes, small_blocks, tmp_path):
    buffer = fbuf.Buffer(12, lanes=lanes)
    state = buffer.init(jax.tree.map(lambda x: x[0] if lanes is None else x[0, 0], made(1, lanes)))
    mask = np.ones((20,) if lanes is None else (20, lanes), bool)
    if lanes:
        mask[3:18, 1] = False  # lane 1 is not full
    state = buffer.extend(state, made(20, lanes), mask=mask)
    done = to_file(tmp_path / f"rows{suffix}", buffer, state, compress=lanes is None)
    assert done.rows == int(buffer.size(state)) and done.nbytes == (tmp_path / f"rows{suffix}").stat().st_size
    other, again = from_file(tmp_path / f"rows{suffix}", buffer=fbuf.Buffer(14, lanes=lanes))
    same(held(other, again), held(buffer, state))
    assert [p.name for p in tmp_path.iterdir()] == [f"rows{suffix}"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_dtype_comes_back(suffix, tmp_path):
    path, generator = tmp_path / f"all{suffix}", np.random.default_rng(0)
    wanted = {}
    for name, dtype in DTYPES.items():
        values = generator.integers(0, 2 if name == "bool" else 8, (5, 3))
        wanted[name] = values.astype(np.float32).astype(dtype)
    with _sink.opened("test", path, False, False) as sink:
        for name, leaf in wanted.items():
            sink.column(name, leaf.shape, leaf.dtype, iter([leaf[:2], leaf[2:]]))
        sink.finish({"format": "fbuf rows", "version": 1, "layout": "rows", "lanes": None, "steps": 5})
    with _load.opened("test", path) as reader:
        source = _load._source(path, reader, None, None)
        same({name: source.columns[name].read(0, 5) for name in wanted}, wanted)


def test_arrays_of_any_strides_and_read_only_ones():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    base.flags.writeable = False
    for array in (base.T, base[::-1], base[:, ::-2], np.broadcast_to(base[:1], (4, 6)), np.asfortranarray(base)):
        buffer, state = from_arrays({"x": array})
        assert np.array_equal(buffer.rows(state).data["x"], array)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_empty_buffer(suffix, tmp_path):
    buffer = fbuf.Buffer(4)
    state = buffer.init({"x": jnp.zeros(3)})
    assert to_file(tmp_path / f"none{suffix}", buffer, state).rows == 0
    other, again = from_file(tmp_path / f"none{suffix}")
    assert int(other.size(again)) == 0 and other.storage.spec(again.rows)[0]["x"].shape == (3,)


def test_numpy_and_h5py_read_the_files(tmp_path):
    h5py = pytest.importorskip("h5py")
    buffer, state = from_arrays(made(9))
    to_file(tmp_path / "a.npz", buffer, state, names={"next": "then", "x": None, "nothing": None}, episode=None)
    to_file(tmp_path / "a.h5", buffer, state, names={"next": "then", "x": None, "nothing": None})
    with np.load(tmp_path / "a.npz", allow_pickle=False) as one, h5py.File(tmp_path / "a.h5") as other:
        assert sorted(one.files) == ["__fbuf__", "action", "done", "then/obs"]
        assert (
            json.loads(one["__fbuf__"].tobytes())["steps"] == 9 and json.loads(other.attrs["fbuf"])["layout"] == "rows"
        )
        for name in ("action", "done", "then/obs"):
            assert one[name].dtype == other[name].dtype and (one[name] == other[name][:]).all()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_others(suffix, tmp_path):
    rows = {"a": np.arange(6, dtype=np.int32).reshape(3, 2), "b": np.arange(6.0, dtype=np.float32).reshape(3, 2)}
    path = tmp_path / f"other{suffix}"
    if suffix == ".npz":
        np.savez(path, **rows)
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, leaf in rows.items():
                file.create_dataset(f"g/{name}", data=leaf)
        rows = {f"g/{n}": x for n, x in rows.items()}
    buffer, state = from_file(path)
    same(held(buffer, state), rows)
    buffer, state = from_file(path, lanes=2)
    assert buffer.lanes == 2 and buffer.capacity == 6


def test_episode_numbers(tmp_path):
    buffer = fbuf.Buffer(12, lanes=2, episode_end=("done",))
    state = buffer.init({"done": False})
    ends = np.array([[0, 1], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]], bool)
    done = to_file(tmp_path / "e.npz", buffer, buffer.extend(state, {"done": ends}), episode="episode")
    with np.load(tmp_path / "e.npz") as file:
        ids = file["episode"]
    assert done.episodes == 6 and ids[:, 0].tolist() == [0, 0, 2, 2, 2, 4] and ids[:, 1].tolist() == [1, 3, 3, 3, 5, 5]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"path": "a.txt"}, ValueError, "ends in '.txt'; expected .npz, .h5 or .hdf5"),
        ({"names": {"nope": "y"}}, ValueError, "names has 'nope', but rows have"),
        ({"names": {"x": "action"}}, ValueError, "'action' would be two columns"),
        ({"names": {"x": "next"}}, ValueError, "'next' would be a column and a group"),
        ({"names": {"x": "__mask__"}}, ValueError, "'__mask__' is kept for the file's own"),
        ({"names": {"x": "../x"}}, ValueError, "names a leaf '../x'"),
        ({"episode": "episode"}, ValueError, "nothing says where episodes end"),
        ({"state": 3}, TypeError, r"The order is to_file\(path, buffer, state\)"),
    ],
)
def test_what_cannot_be_written_is_said(settings, error, match, tmp_path):
    buffer, state = from_arrays(made(3))
    given = {"path": "a.npz", "buffer": buffer, "state": state} | settings
    with pytest.raises(error, match=match):
        to_file(**given | {"path": tmp_path / given["path"]})
    assert not list(tmp_path.iterdir())


def test_ragged_rows_are_refused(tmp_path):
    buffer = fbuf.Buffer(4, storage=fbuf.storages.Ragged())
    with pytest.raises(TypeError, match="Use fbuf.save"):
        to_file(tmp_path / "a.npz", buffer, buffer.init({"text": "hello"}))


def test_a_state_whose_rows_expired_is_refused(tmp_path):
    buffer = fbuf.Buffer(4, storage=Host(slack=0, on_expired="mask"))
    old = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(4)})
    new = buffer.extend(old, {"t": jnp.arange(4, 8)})
    with pytest.raises(RuntimeError, match="expired"):
        to_file(tmp_path / "a.npz", buffer, old)
    assert not list(tmp_path.iterdir()) and to_file(tmp_path / "a.npz", buffer, new).rows == 4


# ------------------------------------------------------------------------------------------- whole files, or none


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_error_at_any_call_leaves_what_was_there(suffix, monkeypatch, tmp_path):
    """The n-th block that is read, and every step after, raises, for every n."""
    buffer, state = from_arrays(made(9))
    path = tmp_path / f"rows{suffix}"
    to_file(path, buffer, state, names={"x": None})
    before = path.read_bytes()
    monkeypatch.setattr(_read, "BLOCK_BYTES", 24)
    calls = {"left": 0}

    def failing(inner):
        def call(*args, **kwargs):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise OSError(28, "No space left on device")
            return inner(*args, **kwargs)

        return call

    monkeypatch.setattr(_read.Reader, "leaf", failing(_read.Reader.leaf))
    monkeypatch.setattr(_sink, "_sync", failing(_sink._sync))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    for n in range(1, 100):
        calls["left"] = n
        try:
            to_file(path, buffer, state, overwrite=True)
        except OSError:
            now = path.read_bytes()
            assert now == before or calls["left"] == 0 and n > 5
            assert [p.name for p in tmp_path.iterdir()] == [path.name]
        else:
            break
    assert n > 10 and path.read_bytes() != before
    from_file(path)


def test_a_file_that_is_there_stays_unless_asked(tmp_path):
    buffer, state = from_arrays(made(3))
    (tmp_path / "a.npz").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        to_file(tmp_path / "a.npz", buffer, state)
    assert (tmp_path / "a.npz").read_bytes() == b"mine"


FULL_DISK = """
import resource, sys
import jax.numpy as jnp, numpy as np
import fbuf
buffer, state = fbuf.interop.from_arrays({"x": np.arange(2**18, dtype=np.float32)})
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    fbuf.interop.to_file(sys.argv[1], buffer, state)
except OSError as error:
    print("refused", type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk(suffix, tmp_path):
    got = run(FULL_DISK, str(tmp_path / f"rows{suffix}"))
    assert "refused" in got and not list(tmp_path.iterdir())


MEMORY = """
import gc, resource, sys
import numpy as np
import fbuf
folder = sys.argv[1]

class Frames:
    # 40,000 frames that nobody holds: made when they are asked for
    def __init__(self, n):
        self.shape, self.dtype = (n, 84, 84), np.dtype(np.uint8)

    def __getitem__(self, at):
        t = (np.arange(at.start, at.stop) % 251).astype(np.uint8)
        return np.broadcast_to(t[:, None, None], (len(t), 84, 84))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def both(n, name):
    buffer = fbuf.Buffer(n, storage=fbuf.storages.Compressed(keys=("x",)))
    buffer, state = fbuf.interop.from_arrays({"x": Frames(n), "i": np.arange(n, dtype=np.int32)}, buffer=buffer)
    done = fbuf.interop.to_file(f"{folder}/{name}", buffer, state)
    assert done.nbytes > n * 84 * 84
    del state
    gc.collect()
    buffer, state = fbuf.interop.from_file(f"{folder}/{name}", buffer=buffer)
    assert int(buffer.size(state)) == n
    return buffer.nbytes(state)["host"]

for suffix in (".npz", ".h5"):
    both(4000, "warm" + suffix)
before = peak()
kept = [both(40_000, "all" + suffix) for suffix in (".npz", ".h5")]
print((peak() - before) // 2**20, max(kept) // 2**20)
"""


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path):
    """Rows of 282 MB in and out through a compressed buffer: what is in memory is no third of them."""
    more, kept = map(int, run(MEMORY, str(tmp_path)).split()[-2:])
    assert more < 100 + kept, (more, kept)


def run(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ---------------------------------------------------------------------------------------------------------- TED


def ted_of(lanes, *, final=False, given=False, resets=False):
    """What `to_ted` is to write, row by row: the plain words of its documentation."""
    out, dropped = [], 0
    for rows in lanes:
        kinds, resetting = [], False
        for row in rows:
            kinds.append("reset" if resetting else "step")
            resetting = resets and not resetting and (row["terminated"] or row["truncated"])
        kept = []
        for i, row in enumerate(rows):
            if kinds[i] == "reset":
                kept.append(None)
                continue
            end = row["terminated"] or row["truncated"]
            after = rows[i + 1]["obs"] if i + 1 < len(rows) else None
            if given:
                successor = row["given"]
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
            kept.append([row["obs"], successor, row["reward"], row["terminated"], row["truncated"]])
        for i, (row, entry) in enumerate(zip(rows, kept, strict=True)):
            if isinstance(entry, list) and not (row["terminated"] or row["truncated"]):
                entry[4] = i + 1 == len(rows) or not isinstance(kept[i + 1], list)
        out += [entry for entry in kept if isinstance(entry, list)]
    return out, dropped


@st.composite
def episodes(draw):
    lanes = draw(st.integers(1, 2))
    n = draw(st.integers(0, 10))
    ends = draw(st.lists(st.sampled_from(["", "", "", "t", "u", "tu"]), min_size=n * lanes, max_size=n * lanes))
    return lanes, n, np.array(ends, object).reshape(n, lanes)


class Table:
    """What `to_ted` reads rows from, without a buffer: the same words over numpy arrays `[n, E, ...]`."""

    def __init__(self, call, buffer, rows):
        self.buffer, self.rows = buffer, rows
        steps, lanes = rows["reward"].shape
        self.spec = {n: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for n, x in rows.items()}
        self.sizes, self.steps, self.lanes = np.full(lanes, steps), steps, lanes

    def mask(self, first, last):
        return np.ones((last - first, len(self.sizes)), bool)

    def flag(self, name):
        return self.rows[name]

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
def test_ted_is_what_its_words_say(case, mode, any_state, tmp_path_factory):
    lanes, n, ends = case
    path = tmp_path_factory.mktemp("ted") / "a.npz"
    final, given_next, resets = mode == "final", mode == "given", mode == "resets"
    view = fbuf.views.Transition(
        final_observation="final" if final else None, autoreset="next_step" if resets else "same_step"
    )
    buffer = fbuf.Buffer(11 * lanes, lanes=lanes, view=view)  # one more than there ever is
    t = np.arange(n * lanes, dtype=np.float32).reshape(n, lanes)
    rows = {
        "obs": np.stack([t, -t], -1),
        "action": t.astype(np.int32),
        "reward": t / 2,
        "terminated": np.array([["t" in e for e in row] for row in ends], bool).reshape(n, lanes),
        "truncated": np.array([["u" in e for e in row] for row in ends], bool).reshape(n, lanes),
        "final": np.stack([t + 0.25, t], -1),
        "given": np.stack([t + 0.75, t], -1),
    }
    table = [[{name: leaf[i, lane].tolist() for name, leaf in rows.items()} for i in range(n)] for lane in range(lanes)]
    wanted, dropped = ted_of(table, final=final, given=given_next, resets=resets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ted, "Reader", lambda call, buffer, state: Table(call, buffer, rows))
        done = to_ted(path, buffer, any_state, next_observation="given" if given_next else None)
    with np.load(path) as file:
        got = {name: file[name] for name in file.files}
    assert (done.rows, done.dropped) == (len(wanted), dropped)
    for column, name in enumerate(
        ["observation", "next/observation", "next/reward", "next/terminated", "next/truncated"]
    ):
        expected = [np.ravel(row[column]).tolist() for row in wanted]
        assert got[name].reshape(len(wanted), got[name].shape[1]).tolist() == expected, name
    assert (got["next/done"] == got["next/terminated"] | got["next/truncated"]).all()
    assert not got["done"].any() and got["next/reward"].shape == (len(wanted), 1)
    ids, over = got["collector/traj_ids"], got["next/done"][:, 0]
    # every episode is one run of numbers, and ends with done
    assert (ids[1:] >= ids[:-1]).all() and ((ids[1:] != ids[:-1]) == over[:-1]).all() and over[-1:].all()
    assert done.episodes == len(set(ids.tolist()))


def test_ted_of_a_full_ring_and_of_compressed_rows(small_blocks, tmp_path):
    view = fbuf.views.Transition(truncated=None, stack=2)
    buffer = fbuf.Buffer(8, storage=Compressed(keys=("obs",)), view=view)
    example = {
        "obs": jnp.zeros((2, 2), jnp.uint8),
        "action": 0,
        "reward": 0.0,
        "terminated": False,
        "extra": {"v": 0.0},
    }
    t = np.arange(13)
    rows = {
        "obs": np.broadcast_to(t[:, None, None], (13, 2, 2)).astype(np.uint8),
        "action": t.astype(np.int32),
        "reward": t.astype(np.float32),
        "terminated": t == 8,
        "extra": {"v": t.astype(np.float32)},
    }
    state = buffer.extend(buffer.init(example), rows)
    done = to_ted(tmp_path / "a.npz", buffer, state, names={"obs": "pixels", "extra": "e"}, episode="episode")
    with np.load(tmp_path / "a.npz") as file:
        assert file["action"].tolist() == [5, 6, 7, 8, 9, 10, 11] and done.dropped == 1
        assert file["next/pixels"][:, 0, 0].tolist() == [6, 7, 8, 8, 10, 11, 12]
        assert file["next/done"][:, 0].tolist() == [False] * 3 + [True] + [False] * 2 + [True]
        assert file["e/v"].tolist() == file["action"].tolist() and file["episode"].tolist() == [0] * 4 + [1] * 3
    other, again = from_file(tmp_path / "a.npz", fields={"pixels": "obs", "next/reward": "r"})
    assert held(other, again)["r"].shape == (7, 1)


def test_the_oldest_row_of_a_full_ring_may_be_a_reset_row(tmp_path):
    buffer = fbuf.Buffer(4, view=fbuf.views.Transition(autoreset="next_step", truncated=None))
    example = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
    t = np.arange(6)
    rows = {"obs": t.astype(np.float32), "action": t, "reward": t.astype(np.float32), "terminated": t == 1}
    state = buffer.extend(buffer.init(example), jax.tree.map(jnp.asarray, rows))  # row 2 is a reset row, and the oldest
    done = to_ted(tmp_path / "a.npz", buffer, state)
    with np.load(tmp_path / "a.npz") as file:
        assert file["action"].tolist() == [3, 4] and done.dropped == 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"observation": "o"}, "observation is 'o', but rows have .* Name the leaf: observation='...'"),
        ({"terminated": "reward"}, r"terminated is 'reward', float32\[\]; expected one bool a row"),
        ({"next_observation": "reward"}, "expected what observation has"),
        ({"episode": "action"}, "'action' would be two columns"),
        ({"names": {"action": "next"}}, "'next' would be a column and a group"),
    ],
)
def test_ted_that_cannot_be_is_said(settings, match, tmp_path):
    rows = {"obs": np.zeros((3, 2), np.float32), "action": np.zeros(3, np.int32), "reward": np.zeros(3, np.float32)}
    buffer, state = from_arrays(rows | {"terminated": np.zeros(3, bool)})
    with pytest.raises(ValueError, match=match):
        to_ted(tmp_path / "a.npz", buffer, state, **settings)
    assert not list(tmp_path.iterdir())


def test_lanes_share_blocks():
    """Many short lanes are read in blocks over lanes, not one block each."""

    class Fake:
        def block(self, name):
            return 4

    plan = _ted._Plan(np.array([[1, 1, 0], [1, 0, 1], [1, 1, 1]], bool), *[np.zeros((3, 3), bool)] * 5, 0)
    blocks = [(age.tolist(), lane.tolist()) for age, lane, _ in _ted._kept(Fake(), plan, "x")]
    assert blocks == [([0, 1, 2, 0], [0, 0, 0, 1]), ([2, 1, 2], [1, 2, 2])]


@pytest.mark.slow
def test_torchrl_reads_ted(tmp_path):
    """torchrl takes the file as it is, and its slices never run from one episode into another."""
    pytest.importorskip("h5py")
    tensordict, torch = pytest.importorskip("tensordict"), pytest.importorskip("torch")
    data = pytest.importorskip("torchrl.data")
    buffer = fbuf.Buffer(40, lanes=2, view=fbuf.views.Transition())
    t = np.arange(40).reshape(20, 2)
    rows = {"obs": t.astype(np.float32), "action": t.astype(np.int32), "reward": t.astype(np.float32)}
    rows |= {"terminated": t % 14 == 9, "truncated": t % 26 == 16}
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0, 0], rows)), rows)
    done = to_ted(tmp_path / "a.h5", buffer, state)
    td = tensordict.PersistentTensorDict.from_h5(str(tmp_path / "a.h5")).to_tensordict()
    assert td.shape == (done.rows,)
    sampler = data.SliceSampler(slice_len=3, strict_length=False)
    replay = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(done.rows), sampler=sampler, batch_size=60)
    replay.extend(td)
    torch.manual_seed(0)
    batch = replay.sample()
    obs, after = batch["observation"], batch["next", "observation"]
    ids, over = batch["collector", "traj_ids"], batch["next", "terminated"][:, 0]
    assert (((after - obs) == 2) | over).all()
    step = (ids[1:] == ids[:-1]) & (obs[1:] - obs[:-1] == 2)
    assert step.any() and (after[:-1][step] == obs[1:][step]).all()
