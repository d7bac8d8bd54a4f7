"""Rows from plain arrays and files and back: every row, dtype and storage, in blocks; files are whole or absent."""

import itertools
import json
import os

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._rows import columns as _columns
from fbuf._rows import row_reader as _row_reader
from fbuf._rows.columns import DTYPES
from fbuf.interop import _export, to_file, to_ted
from fbuf.storages import Compressed, Host, Memmap
from tests.support.interop import (
    check_flips,
    check_truncations,
    every_kind,
    from_arrays,
    from_file,
    held,
    read_file,
    written,
)
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import same

SUFFIXES = (".npz", ".h5")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 100)
    monkeypatch.setattr(_row_reader, "BLOCK_BYTES", 100)


@pytest.mark.parametrize("lanes", [None, 3])
def test_arrays_fill_a_buffer_of_their_size(lanes, small_blocks):
    rows = every_kind(17, lanes)
    buffer, state = from_arrays(rows, lanes=lanes)
    assert (buffer.capacity, buffer.lanes) == (17 * (lanes or 1), lanes)
    by_lane = {}
    for name, x in fbuf._core.pytree.named_leaves(rows).items():
        x = x.reshape(17, lanes or 1, *x.shape[1 + (lanes is not None) :]).swapaxes(0, 1)
        by_lane[name] = x.reshape(17 * (lanes or 1), *x.shape[2:])
    same(held(buffer, state), by_lane)
    assert all(int(v) == 0 for n, v in buffer.stats(state).items() if n.startswith("refused"))


def test_fields_rename_and_leave_out_and_the_newest_rows_are_taken(small_blocks):
    fields = {"next/obs": "obs", ("action",): ("a", "b")}
    buffer, state = from_arrays(every_kind(17), fields=fields, newest=4)
    rows = buffer.rows(state).data
    assert buffer.capacity == 4 and set(rows) == {"obs", "a"}
    assert rows["obs"].shape == (4, 4, 3) and rows["a"]["b"].tolist() == [13, 14, 15, 16]


@pytest.mark.more
def test_priorities_of_windows_are_those_of_their_first_rows(small_blocks):
    view = fbuf.views.Sequence(3, episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(40, lanes=2, view=view, sampler=fbuf.samplers.Prioritized(1.0, eps=0.0, normalize=None))
    n, priority = 15, np.arange(1.0, 31.0).reshape(15, 2)
    rows = {"t": np.arange(30, dtype=np.int32).reshape(n, 2), "done": np.zeros((n, 2), bool)}
    with pytest.warns(UserWarning, match="4 of 30 rows have a priority but are not drawn"):
        buffer, state = from_arrays(rows, buffer=buffer, priority=-priority)
    assert int(buffer.stats(state)["refused_closed"]) == 0
    _, batch = buffer.sample(state, jax.random.key(1), 128)
    first = np.asarray(batch.data["t"])[:, 0]
    total = priority.reshape(-1)[: 2 * (n - 2)].sum()
    np.testing.assert_allclose(batch.probability, priority.reshape(-1)[first] / total, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"arrays": {}}, ValueError, "no leaves"),
        ({"arrays": {"a": np.zeros(3), "b": np.zeros(4)}}, ValueError, "'b' has 4 rows; expected 3"),
        ({"arrays": {"a": np.float32(0)}}, ValueError, r"shape \[\]; expected \[N"),
        ({"arrays": every_kind(3), "fields": {"x": "z", "action": "z"}}, ValueError, "'x' and 'action' would be"),
        ({"lanes": 2}, ValueError, r"expected \[N, 2, ...\]"),
        ({"fields": "flat"}, TypeError, "expected a dict"),
        ({"fields": ["b"]}, ValueError, "has 'b', which is missing; expected some of: a"),
        ({"fields": {"a": "c"}, "dtypes": {"a": "int32"}}, ValueError, "dtypes has 'a', but leaves are c"),
        ({"dtypes": {"a": "object"}}, TypeError, "expected one of bool"),
        ({"dtypes": {"a": "float64"}}, TypeError, "expected one of bool"),
        ({"newest": -1}, ValueError, "newest is -1"),
        ({"buffer": fbuf.Buffer(3)}, ValueError, "there are 4 rows, but the buffer holds 3. Use capac.*4, .*newest=3"),
        ({"buffer": fbuf.Buffer(4), "capacity": 4}, ValueError, "Drop capacity=4"),
        ({"capacity": 3}, ValueError, "there are 4 rows, but the buffer holds 3. Use capac.*4, .*newest=3"),
        ({"arrays": {"obs": np.zeros((0, 2), np.float32), "terminated": np.zeros(0, bool)}}, ValueError, "are no rows"),
        (
            {"arrays": {"x": np.zeros(2, np.float32), "terminated": np.array([0.0, np.nan])}},
            ValueError,
            "is nan in row 1",
        ),
        ({"priority": np.array([1, np.nan, 1, 1])}, ValueError, "not finite"),
        ({"arrays": {"a": np.zeros(3)}}, TypeError, "or round: dtypes={'a': 'float32'}"),
        ({"arrays": {"a": np.array([0, 2**40])}}, ValueError, "rows 0 to 1 hold values that int32 cannot"),
        ({"dtypes": {"a": "uint8"}, "arrays": {"a": np.array([0.5], np.float32)}}, ValueError, "that uint8 cannot"),
        ({"arrays": {"a": np.array(["x"])}}, ValueError, "leaf 'a' is <U1; expected plain numbers"),
        ({"dtypes": {"a": "float16"}, "arrays": {"a": np.array([1e6], np.float32)}}, ValueError, "that float16 cannot"),
    ],
)
def test_invalid_arrays_are_refused(settings, error, match):
    settings = dict(settings)
    data = settings.pop("arrays", {"a": np.arange(4, dtype=np.float32)})
    raises(error, match, from_arrays, data, **settings)


def test_a_replay_is_no_buffer_to_fill():
    source, replay = fbuf.interop.from_arrays({"x": np.arange(4)}), fbuf.Replay(fbuf.Buffer(4), {"x": 0})
    raises(
        TypeError, r"buffer is Replay; .* Write replay.state = source.into\(replay.buffer\)\[1\]", source.into, replay
    )
    raises(TypeError, "buffer is BufferState; expected a Buffer.$", source.into, replay.state)
    replay.state = source.into(replay.buffer)[1]
    assert replay.rows().data["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("storage", [Memmap, Compressed])
def test_an_import_that_fails_leaves_no_store(storage, small_blocks, tmp_path):
    buffer = fbuf.Buffer(30, storage=storage(path=str(tmp_path / "rows")))

    class Torn:
        shape, dtype = (30, 4096), np.dtype(np.uint8)

        def __getitem__(self, rows):
            if rows.start > 10:
                raise OSError("the network went away")
            return np.zeros((rows.stop - rows.start, 4096), np.uint8)

    pytest.raises(OSError, lambda: from_arrays({"x": Torn()}, buffer=buffer)).match("the network went away")
    assert not (tmp_path / "rows").exists()
    _, state = from_arrays({"x": np.ones((30, 4096), np.uint8)}, buffer=buffer)
    assert int(buffer.size(state)) == 30


def test_values_are_cast_where_the_caller_asks_or_nothing_is_lost():
    arrays = {"a": np.array([0.1, 2.5]), "b": np.array([1, 2**31 - 1])}
    buffer, state = from_arrays(arrays, dtypes={"a": "float32"})
    rows = buffer.rows(state).data
    assert rows["a"].tolist() == [np.float32(0.1), 2.5] and rows["b"].dtype == jnp.int32 and rows["b"][1] == 2**31 - 1


@pytest.mark.parametrize("dtype", [np.bool_, np.float32, jnp.bfloat16, np.complex64])
def test_large_blocks_are_read_by_jax_without_a_copy(dtype):
    for shape in ((1 << 18, 17), (3, 0), (5,)):
        block = _columns.empty(shape, np.dtype(dtype))
        assert block.shape == shape and block.dtype == dtype
    block = _columns.empty((1 << 18, 17), np.dtype(dtype))
    block[...] = 1
    assert jax.device_put(block).unsafe_buffer_pointer() == block.ctypes.data


def test_flags_of_64_bits_are_flags():
    flags = {
        "terminated": np.array([0.0, 0.0, 1.0]),
        "truncated": np.zeros(3, np.int64),
        "late": np.array([1.0, 0.0, 0.0]),
    }
    data = {"obs": np.zeros((3, 2), np.float32), **flags}
    buffer, state = fbuf.interop.from_arrays(data, episode_end=("late",)).into()
    rows = buffer.rows(state).data
    assert rows["terminated"].tolist() == [False, False, True] and rows["truncated"].tolist() == [True, False, False]


def test_arrays_may_have_any_strides_and_be_read_only():
    base = np.arange(48, dtype=np.float32)
    base.flags.writeable = False
    whole = base[:24].reshape(4, 6)
    views = (base[:24].reshape(6, 4).T, whole[::-1], base.reshape(4, 12)[:, ::-2], np.asfortranarray(whole))
    for array in (*views, np.broadcast_to(whole[:1], (4, 6))):
        buffer, state = from_arrays({"x": array})
        assert np.array_equal(buffer.rows(state).data["x"], array)


def test_rows_come_back_from_files(small_blocks, tmp_path):
    buffer = fbuf.Buffer(12, lanes=2)
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], every_kind(1, 2)))
    mask = np.ones((20, 2), bool)
    mask[3:18, 1] = False
    state = buffer.extend(state, every_kind(20, 2), mask=mask)
    wanted = held(buffer, state)
    assert wanted["action"].tolist() == [*range(28, 40, 2), 1, 3, 5, 37, 39]
    for number, suffix in enumerate(SUFFIXES):
        done = to_file(tmp_path / f"rows{suffix}", buffer, state, compress=number == 1)
        assert done.rows == 11 and done.nbytes == (tmp_path / f"rows{suffix}").stat().st_size
        same(held(*from_file(tmp_path / f"rows{suffix}", buffer=fbuf.Buffer(14, lanes=2))), wanted)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_dtype_comes_back(suffix, tmp_path):
    path, generator = tmp_path / f"all{suffix}", np.random.default_rng(0)
    wanted = {}
    for name, dtype in DTYPES.items():
        values = generator.integers(0, 2 if name == "bool" else 8, (5, 3))
        wanted[name] = values.astype(np.float32).astype(dtype)
    with _export.open_sink("test", path, False, False) as sink:
        for name, leaf in wanted.items():
            sink.column(name, leaf.shape, leaf.dtype, iter([leaf[:2], leaf[2:]]))
        sink.finish({"format": "fbuf rows", "version": 1, "layout": "rows", "lanes": None, "steps": 5})
    got = read_file(path)
    same({name: got[name] for name in wanted}, wanted)


def test_a_buffer_may_be_larger_than_its_rows_or_empty(tmp_path):
    buffer, state = from_arrays({"x": np.zeros((0, 2), np.float32)})
    assert (buffer.capacity, int(buffer.size(state))) == (1, 0)
    assert from_arrays({"x": np.zeros(3, np.float32)}, capacity=10)[0].capacity == 10
    buffer = fbuf.Buffer(4)
    state = buffer.init({"x": np.zeros(3, np.float32)})
    for suffix in SUFFIXES:
        assert to_file(tmp_path / f"none{suffix}", buffer, state).rows == 0
        other, again = from_file(tmp_path / f"none{suffix}")
        assert int(other.size(again)) == 0 and other.storage.spec(again.rows)[0]["x"].shape == (3,)


def test_numpy_and_h5py_read_the_files(tmp_path):
    buffer, state = from_arrays(every_kind(9))
    to_file(tmp_path / "a.npz", buffer, state, names={"next": "then", "x": None, "nothing": None}, episode=None)
    to_file(tmp_path / "a.h5", buffer, state, names={"next": "then", "x": None, "nothing": None})
    with np.load(tmp_path / "a.npz", allow_pickle=False) as one, h5py.File(tmp_path / "a.h5") as other:
        assert sorted(one.files) == ["__fbuf__", "action", "done", "then/obs"]
        assert json.loads(one["__fbuf__"].tobytes())["steps"] == 9
        assert json.loads(other.attrs["fbuf"])["layout"] == "rows"
        for name in ("action", "done", "then/obs"):
            assert one[name].dtype == other[name].dtype and (one[name] == other[name][:]).all()


def test_files_of_other_programs_are_read(tmp_path):
    row = np.arange(6, dtype=np.int32).reshape(3, 2)
    np.savez(tmp_path / "other.npz", a=row, b=row)
    same(read_file(tmp_path / "other.npz"), {"a": row, "b": row})
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_dataset("g/a", data=row)
    buffer, state = from_file(tmp_path / "other.h5", lanes=2)
    assert buffer.lanes == 2 and buffer.capacity == 6
    same(held(buffer, state), {"g/a": row.T.reshape(-1)})


def test_episodes_are_numbered(tmp_path):
    buffer = fbuf.Buffer(12, lanes=2, episode_end=("done",))
    state = buffer.init({"done": False})
    ends = np.array([[0, 1], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]], bool)
    done = to_file(tmp_path / "e.npz", buffer, buffer.extend(state, {"done": ends}), episode="episode")
    with np.load(tmp_path / "e.npz") as file:
        ids = file["episode"]
    assert done.episodes == 6 and ids[:, 0].tolist() == [0, 0, 2, 2, 2, 4] and ids[:, 1].tolist() == [1, 3, 3, 3, 5, 5]


def test_what_cannot_be_written_is_refused(tmp_path):
    buffer, state = from_arrays(every_kind(9))
    ragged = fbuf.Buffer(4, storage=fbuf.storages.Ragged())
    for settings, error, match in (
        ({"path": "a.txt"}, ValueError, "ends in '.txt'; expected .npz, .h5 or .hdf5"),
        ({"names": {"nope": "y"}}, ValueError, "names has 'nope', but rows have"),
        ({"names": {"x": "action"}}, ValueError, "'action' would be two columns"),
        ({"names": {"x": "next"}}, ValueError, "'next' would be a column and a group"),
        ({"names": {"x": "__mask__"}}, ValueError, "'__mask__' is reserved"),
        ({"names": {"x": "../x"}}, ValueError, "leaf '../x' has an invalid name"),
        ({"episode": "episode"}, ValueError, "rows have no ends"),
        ({"state": 3}, TypeError, r"expected a Buffer and state"),
        ({"buffer": ragged, "state": ragged.init({"text": "hello"})}, TypeError, "Use fbuf.save"),
    ):
        given = {"path": "a.npz", "buffer": buffer, "state": state} | settings
        raises(error, match, to_file, **given | {"path": tmp_path / given["path"]})
    (tmp_path / "a.npz").write_bytes(b"mine")
    raises(FileExistsError, "overwrite=True", to_file, tmp_path / "a.npz", buffer, state)
    assert (tmp_path / "a.npz").read_bytes() == b"mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_appears_during_an_export_stays(tmp_path, monkeypatch, links):
    buffer, state = from_arrays(every_kind(9))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.open("/nowhere", 0))
    to_file(tmp_path / "b.npz", buffer, state)
    path = tmp_path / "a.npz"
    settings = {"progress": lambda *_: path.write_bytes(b"theirs")}
    raises(FileExistsError, "overwrite=True", to_file, path, buffer, state, **settings)
    assert path.read_bytes() == b"theirs" and len(list(tmp_path.iterdir())) == 2
    to_file(path, buffer, state, overwrite=True, **settings)
    assert path.read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_state_whose_rows_expired_is_refused(tmp_path):
    buffer = fbuf.Buffer(4, storage=Host(slack=0, on_expired="mask"))
    old = buffer.extend(buffer.init({"t": 0}), {"t": np.arange(4, dtype=np.int32)})
    new = buffer.extend(old, {"t": np.arange(4, 8, dtype=np.int32)})
    pytest.raises(RuntimeError, lambda: to_file(tmp_path / "a.npz", buffer, old)).match("expired")
    assert not list(tmp_path.iterdir()) and to_file(tmp_path / "a.npz", buffer, new).rows == 4


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_error_at_any_call_leaves_the_old_file(suffix, monkeypatch, tmp_path):
    buffer, state = from_arrays(every_kind(9))
    path = tmp_path / f"rows{suffix}"
    to_file(path, buffer, state, names={"x": None})
    before = path.read_bytes()
    monkeypatch.setattr(_row_reader, "BLOCK_BYTES", 24)
    left = iter(())

    def failing(inner):
        return lambda *args, **kwargs: inner(*args, **kwargs) if next(left) else os.open("/nowhere", 0)

    for owner, name in ((_row_reader.Reader, "leaf"), (_export, "_sync"), (os, "replace")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    for n in range(1, 100):
        left = itertools.chain([True] * (n - 1), [False], itertools.repeat(True))
        try:
            to_file(path, buffer, state, overwrite=True)
        except OSError:
            assert path.read_bytes() == before or n > 5
            assert [p.name for p in tmp_path.iterdir()] == [path.name]
        else:
            break
    assert n > 10 and path.read_bytes() != before
    same(read_file(path), fbuf._core.pytree.named_leaves(every_kind(9)))


on_full = one_of("retire", exhaustive=["refuse"])


@pytest.mark.more
def test_a_storage_filled_by_an_import_keeps_every_row_or_raises(on_full):
    frames = np.random.default_rng(0).integers(0, 255, (300, 12, 12), np.uint8)
    storage = fbuf.storages.Deduplicated(keys=("x",), block=(12, 12), blocks=160, on_full=on_full)
    with pytest.raises(ValueError, match=r"held 1\d\d of 300 rows"):
        from_arrays({"x": frames}, buffer=fbuf.Buffer(400, storage=storage))
    if on_full == "retire":
        buffer, state = from_arrays({"x": frames[:100]}, buffer=fbuf.Buffer(400, storage=storage))
        assert np.array_equal(buffer.rows(state, last=100).data["x"], frames[:100])


FULL_DISK = """
import resource, signal, sys, fbuf
import numpy as np
buffer, state = fbuf.interop.from_arrays({"x": np.arange(2**18, dtype=np.float32)}).into()
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for suffix in (".npz", ".h5"):
    try:
        fbuf.interop.to_file(sys.argv[1] + suffix, buffer, state)
    except OSError as error:
        print("refused", type(error).__name__)
"""


@pytest.mark.more
def test_a_full_disk_leaves_no_file(tmp_path):
    assert run_python(FULL_DISK, tmp_path / "rows").stdout.count("refused") == 2 and not list(tmp_path.iterdir())


MEMORY = """
import gc, resource, sys
import numpy as np
import fbuf
folder = sys.argv[1]

class Frames:
    # 40,000 frames, each made when it is read
    def __init__(self, n):
        self.shape, self.dtype = (n, 84, 84), np.dtype(np.uint8)

    def __getitem__(self, at):
        t = (np.arange(at.start, at.stop) % 251).astype(np.uint8)
        return np.broadcast_to(t[:, None, None], (len(t), 84, 84))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def both(n, name):
    buffer = fbuf.Buffer(n, storage=fbuf.storages.Compressed(keys=("x",)))
    buffer, state = fbuf.interop.from_arrays({"x": Frames(n), "i": np.arange(n, dtype=np.int32)}).into(buffer)
    done = fbuf.interop.to_file(f"{folder}/{name}", buffer, state)
    assert done.nbytes > n * 84 * 84
    del state
    gc.collect()
    buffer, state = fbuf.interop.from_file(f"{folder}/{name}").into(buffer)
    assert int(buffer.size(state)) == n
    return buffer.nbytes(state)["host"]

for suffix in (".npz", ".h5"):
    both(4000, "warm" + suffix)
before = peak()
kept = [both(40_000, "all" + suffix) for suffix in (".npz", ".h5")]
print((peak() - before) // 2**20, max(kept) // 2**20)
"""


@pytest.mark.more
def test_torchrl_slices_ted_within_episodes(tmp_path):
    import tensordict
    import torch
    from torchrl import data

    buffer = fbuf.Buffer(40, lanes=2, view=fbuf.views.Transition(autoreset="same_step"))
    t = np.arange(40).reshape(20, 2)
    rows = {"obs": t.astype(np.float32), "action": t.astype(np.int32), "reward": t.astype(np.float32)}
    rows |= {"terminated": t % 14 == 9, "truncated": t % 26 == 16}
    state = buffer.extend(buffer.init({name: leaf[0, 0] for name, leaf in rows.items()}), rows)
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


compress = one_of(True, exhaustive=[False])


@pytest.mark.more
def test_every_truncation_and_flipped_bit_is_noticed(compress, tmp_path):
    file = written(tmp_path, compress)
    check_truncations(file, tmp_path, every=1)
    check_flips(file, tmp_path, every=1)


FLIPS = """
import sys
from pathlib import Path
import numpy as np
from tests.support.interop import read_file
path = Path(sys.argv[1])
whole, other = path.read_bytes(), path.with_name("b.h5")
wanted, noticed, rng = read_file(path), 0, np.random.default_rng(0)
for at in rng.integers(0, len(whole), 400):
    damaged = bytearray(whole)
    damaged[at] ^= 1 << int(rng.integers(8))
    other.write_bytes(damaged)
    try:
        got = read_file(other)
    except (ValueError, KeyError, RuntimeError, OSError):
        noticed += 1
    else:
        assert got.keys() == wanted.keys() and all(np.array_equal(got[n], wanted[n]) for n in got), at
print("noticed", noticed)
"""


@pytest.mark.more
def test_flipped_bits_of_a_compressed_h5_are_noticed(tmp_path):
    rows = {"x": np.random.default_rng(1).integers(0, 4, (600, 16)).astype(np.uint8)}
    to_file(tmp_path / "a.h5", *from_arrays(rows), compress=True)
    assert int(run_python(FLIPS, tmp_path / "a.h5").stdout.split()[-1]) > 100


@pytest.mark.exhaustive
def test_memory_stays_bounded(tmp_path):
    more, kept = map(int, run_python(MEMORY, tmp_path).stdout.split()[-2:])
    assert more < 100 + kept, (more, kept)
