"""torchrl dumps made by hand: row by row, torn, false, and some that would run code in torchrl's own loader."""

import json
import math
import os
import pickle
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf._core.pytree import named_leaves
from fbuf._rows import columns as _columns
from fbuf.interop import _torchrl
from tests.support.hostile_manifests import at_path
from tests.support.interop import from_torchrl, rollout
from tests.support.processes import run_python
from tests.support.refusals import raises

ROOM = 8  # rows of a ring


def write_dump(path, leaves, *, cursor, count, batch):
    """Write what `rb.dumps` of a tensordict storage does: leaves `[*batch, ...]` under names with slashes."""
    about = {path / "storage": {}}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        folder = path / "storage"
        for parent in parents:
            about[folder][parent] = {"type": "TensorDict"}
            folder /= parent
            about.setdefault(folder, {})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{last}.memmap").write_bytes(np.ascontiguousarray(leaf).tobytes())
        described = {"dtype": f"torch.{leaf.dtype.name}", "shape": list(leaf.shape)}
        about[folder][last] = described | {"device": "cpu", "is_nested": False}
    for folder, entries in about.items():
        entries |= {"shape": batch, "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
        (folder / "meta.json").write_text(json.dumps(entries))
    held = min(count, batch[0]) * math.prod(batch[1:])
    stored = {"metadata": {}, "is_pytree": False, "len": held}
    (path / "storage" / "storage_metadata.json").write_text(json.dumps(stored))
    (path / "writer").mkdir()
    (path / "writer" / "metadata.json").write_text(json.dumps({"cursor": cursor, "write_count": count}))
    return path


def write_ring(path, count=13):
    """Write a ring of 8 rows after `count` were written; return its path and the rows that it holds, oldest first."""
    held = np.arange(max(0, count - ROOM), count)
    t = np.zeros(ROOM, np.int64)
    t[held % ROOM] = held
    leaves = {
        "action": t,
        "observation": np.repeat(t[:, None], 3, 1).astype(np.float32),
        "next/reward": t[:, None].astype(np.float32),
        "next/terminated": (t % 5 == 4)[:, None],
        "index": np.arange(ROOM),
    }
    return write_dump(path, leaves, cursor=count % ROOM, count=count, batch=[ROOM]), held


def write_sampler(path, leaves, alpha, eps, **more):
    """Write priorities, to the power alpha."""
    (path / "sampler").mkdir(exist_ok=True)
    about = {"_alpha": alpha, "_beta": 0.9, "_eps": eps, "_max_capacity": float(len(leaves))}
    (path / "sampler" / "sampler_metadata.json").write_text(json.dumps(about | {"_max_priority": [1.0, 0.0]} | more))
    (path / "sampler" / "sumtree.memmap").write_bytes(leaves.astype(np.float64).tobytes())


def edit(path, **entries):
    """Change entries of a JSON file; `__` in a name leads into an object."""
    about = json.loads(path.read_text())
    for name, value in entries.items():
        *parents, last = name.split("__")
        at_path(about, parents)[last] = value
    path.write_text(json.dumps(about))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 64)


@pytest.mark.parametrize("count", [0, 5, 13])
def test_rows_are_read_oldest_first(count, tmp_path):
    path, held = write_ring(tmp_path / "d", count)
    buffer, state = from_torchrl(path)
    rows = named_leaves(buffer.rows(state).data)
    assert sorted(rows) == ["action", "next/reward", "next/terminated", "observation"]
    if count:
        assert rows["action"].tolist() == held.tolist() and rows["action"].dtype == jnp.int32
        assert rows["next/terminated"][:, 0].tolist() == (held % 5 == 4).tolist()


def test_ted_stores_each_observation_once(tmp_path):
    path, held = write_ring(tmp_path / "d")
    buffer, state = from_torchrl(path, fields="ted")
    rows = buffer.rows(state).data
    assert sorted(rows) == ["action", "obs", "reward", "terminated"]
    assert np.array_equal(rows["obs"], np.repeat(held[:, None], 3, 1)) and rows["reward"].tolist() == held.tolist()
    assert rows["terminated"].dtype == bool and rows["terminated"].tolist() == (held % 5 == 4).tolist()


def test_priorities_are_read(tmp_path):
    path, held = write_ring(tmp_path / "d")
    alpha, eps, td_error = 0.6, 1e-8, np.linspace(0.1, 2.0, 8)
    write_sampler(path, (td_error + eps) ** alpha, alpha, eps)
    buffer, _ = from_torchrl(path)
    assert buffer.sampler == fbuf.samplers.Prioritized(alpha=alpha, beta=0.9)
    source = _torchrl._source(path, None, None, None, True)
    np.testing.assert_allclose(source.priority, td_error[held % 8])
    assert from_torchrl(path, priorities=False)[0].sampler == fbuf.samplers.Uniform()


def test_lanes_and_windows_are_told_apart(tmp_path):
    """A storage of two axes holds lanes or windows; its `len` and the writer's count tell which."""
    leaves = {"x": np.arange(24, dtype=np.float32).reshape(6, 4)}
    buffer, state = from_torchrl(write_dump(tmp_path / "lanes", leaves, cursor=3, count=9, batch=[6, 4]))
    assert buffer.lanes == 4 and buffer.rows(state).data["x"][0].tolist() == [12, 13, 14, 15]
    windows = write_dump(tmp_path / "windows", leaves, cursor=3, count=9, batch=[6, 4])
    about = windows / "storage" / "storage_metadata.json"
    about.write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": 6}))
    buffer, state = from_torchrl(windows)
    assert buffer.lanes is None and buffer.rows(state).data["x"].shape == (6, 4)
    about.write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": 12}))
    raises(ValueError, "may be 4 lanes, or rows that are windows of 4 steps. Pass lanes=4", from_torchrl, windows)


def test_the_folder_of_a_memmap_storage_is_read(tmp_path):
    path, held = write_ring(tmp_path / "d")
    folder = tmp_path / "scratch"
    shutil.copytree(path / "storage", folder)
    (folder / "storage_metadata.json").unlink()
    pytest.raises(ValueError, from_torchrl, folder).match("does not state its number of rows; expected rows=")
    buffer, state = from_torchrl(folder, rows=8, cursor=5, fields=["action"])
    assert buffer.rows(state).data["action"].tolist() == held.tolist()


FALSE = {
    "storage/meta.json": [
        ({"action__dtype": "__import__('os').system('touch ran')"}, "dtype of action.memmap is"),
        ({"action__dtype": "torch.object"}, "expected one as 'torch.float32'"),
        ({"action__dtype": "torch.int32"}, "has 64 bytes; expected 32 of int32"),
        ({"action__shape": [2**40]}, "has 64 bytes; expected 8796093022208"),
        ({"action__shape": [2**40, 2**40]}, "expected fewer than 2\\^62 entries"),
        ({"action__shape": [-8]}, "an axis is '-8'"),
        ({"action__shape": [4, 2]}, "expected \\[8, '...'\\]"),
        ({"../evil": {"dtype": "torch.int64", "shape": [8]}}, "leaf '../evil' has an invalid name"),
        ({"..": {"type": "TensorDict"}}, "leaf '..' has an invalid name"),
        ({"/etc/passwd": {"dtype": "torch.uint8", "shape": [8]}}, "leaf '/etc/passwd' has an invalid name"),
        ({"_type": "<class 'os.system'>"}, "expected a TensorDict"),
        ({"shape": [9]}, "expected \\[9, '...'\\]"),
    ],
    "storage/storage_metadata.json": [
        ({"len": 9}, "states 9 rows"),
        ({"len": -1}, "len is '-1'"),
        ({"len": "8"}, "len is '8'"),
        ({"is_pytree": True, "metadata": {"..a": {}}}, "has an invalid name"),
        ({"is_pytree": True, "metadata": [1]}, "metadata is a list"),
    ],
    "writer/metadata.json": [({"cursor": 99}, "cursor is 99; expected 0 to 8"), ({"cursor": 1.5}, "cursor is '1.5'")],
}


@pytest.mark.parametrize("file", FALSE)
def test_false_descriptions_are_refused(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = write_ring(tmp_path / "d")
    whole = (path / file).read_text()
    for entries, match in FALSE[file]:
        edit(path / file, **entries)
        raises(ValueError, match, from_torchrl, path)
        (path / file).write_text(whole)
    assert not (tmp_path / "ran").exists()


WORDS = ["torch.float32", "TensorDict", "cpu", "..", "a/b", "<class 'tensordict._td.TensorDict'>", "torch.load"]
KEYS = ["a", "next", "shape", "dtype", "type", "is_nested", "_type", "..", "len", "metadata", "is_pytree"]
PLAIN = st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=5)
JSON = st.recursive(PLAIN, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(KEYS), x), max_leaves=12)
FILES = ("storage/meta.json", "storage/storage_metadata.json", "writer/metadata.json", "sampler/sampler_metadata.json")


@pytest.mark.more
@given(value=JSON, file=st.sampled_from(FILES), data=st.data())
@settings(max_examples=100)
def test_any_description_is_read_or_refused(value, file, data, tmp_path_factory):
    path, _ = write_ring(tmp_path_factory.mktemp("any") / "d")
    write_sampler(path, np.ones(8), 0.6, 1e-8)
    about = json.loads((path / file).read_text())
    if data.draw(st.booleans()):
        at = about
        key = data.draw(st.sampled_from(sorted(at)))
        if isinstance(at[key], dict) and at[key] and data.draw(st.booleans()):
            at, key = at[key], data.draw(st.sampled_from(sorted(at[key])))
        at[key] = value
        value = about
    (path / file).write_text(json.dumps(value))
    try:
        source = _torchrl._source(path, None, None, None, True)
        for column in source.columns.values():
            if not column.refused:
                assert len(column.read(0, source.steps)) == source.steps
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error)


def test_storage_and_writer_of_different_dumps_are_refused(tmp_path):
    """torchrl loads such a dump and continues at the wrong row."""
    path, _ = write_ring(tmp_path / "d", 6)
    edit(path / "writer" / "metadata.json", cursor=4, write_count=4)
    raises(ValueError, "cursor is 4, but the storage holds 6 of 8 rows.*files are of two dumps", from_torchrl, path)
    buffer, state = from_torchrl(path, cursor=6)
    assert buffer.rows(state).data["action"].tolist() == [0, 1, 2, 3, 4, 5]


def test_every_truncation_is_noticed(tmp_path):
    path, _ = write_ring(tmp_path / "d")
    for file in (file for file in path.rglob("*") if file.is_file()):
        text = file.read_bytes()
        for size in range(0, len(text), 7):
            file.write_bytes(text[:size])
            pytest.raises(ValueError, from_torchrl, path).match("bytes; expected|not valid JSON")
        file.write_bytes(text)
    from_torchrl(path)


def test_a_missing_file_is_named(tmp_path):
    path, _ = write_ring(tmp_path / "d")
    (path / "storage" / "next" / "reward.memmap").unlink()
    pytest.raises(FileNotFoundError, from_torchrl, path).match("reward.memmap")
    pytest.raises(FileNotFoundError, lambda: from_torchrl(tmp_path / "nothing")).match("is no folder")


def test_links_are_not_followed(tmp_path):
    path, _ = write_ring(tmp_path / "d")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    leaf = path / "storage" / "action.memmap"
    leaf.unlink()
    leaf.symlink_to(secret)
    pytest.raises(ValueError, from_torchrl, path).match("action.memmap: is a link")
    leaf.unlink()
    leaf.write_bytes(bytes(64))
    shutil.move(path / "storage" / "next", tmp_path / "next")
    (path / "storage" / "next").symlink_to(tmp_path / "next")
    pytest.raises(ValueError, from_torchrl, path).match("next: is a link")


def test_deep_and_large_descriptions_are_refused(tmp_path):
    path, _ = write_ring(tmp_path / "d")
    described = path / "storage" / "meta.json"
    described.write_text("[" * 100_000)
    pytest.raises(ValueError, from_torchrl, path).match("is not valid JSON")
    with open(described, "wb") as file:
        file.truncate(2**27)
    pytest.raises(ValueError, from_torchrl, path).match("expected at most 67108864")


def test_text_and_ragged_leaves_can_be_left_out(tmp_path):
    path, held = write_ring(tmp_path / "d")
    edit(path / "storage" / "meta.json", name={"type": "NonTensorData"}, ragged={"is_nested": True, "shape": [8]})
    folder = path / "storage" / "name"
    folder.mkdir()
    (folder / "other.pickle").write_bytes(pickle.dumps("x"))
    raises(ValueError, r"leaf 'name' is a NonTensorData, in .*name/other.pickle, which is a pickle", from_torchrl, path)
    pytest.raises(ValueError, from_torchrl, path, fields=["ragged"]).match("leaf 'ragged' is a nested tensor")
    buffer, state = from_torchrl(path, fields=["action"])
    assert buffer.rows(state).data["action"].tolist() == held.tolist()


def test_invalid_priorities_are_refused(tmp_path):
    path, _ = write_ring(tmp_path / "d")
    for more, leaves, match in (
        ({"_alpha": "0.6"}, np.ones(8), "_alpha is '0.6'"),
        ({"_eps": float("nan")}, np.ones(8), "_eps is 'nan'"),
        ({"_max_capacity": 3.0}, np.ones(8), "there are 3 priorities; expected 8"),
        ({"_max_capacity": 9.0}, np.ones(8), "has 64 bytes; expected 72"),
        ({}, np.full(8, np.nan), "a TD error was NaN"),
        ({}, -np.ones(8), "not finite or below 0"),
    ):
        write_sampler(path, leaves, 0.6, 1e-8, **more)
        pytest.raises(ValueError, from_torchrl, path).match(match)
    from_torchrl(path, priorities=False)


def test_other_kinds_of_dumps_are_named(tmp_path):
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "data_indices.json").write_text("[0]")
    pytest.raises(ValueError, from_torchrl, tmp_path).match("has data_indices.json, of another kind of storage")


AUDIT = """
import os, pickle, sys, warnings
import numpy as np
import fbuf
from fbuf.interop import from_torchrl, from_file
folder = sys.argv[1]
from_torchrl(f"{folder}/good").into()  # everything that is imported or compiled once, is
from_file(f"{folder}/good.npz").into()
watching, seen = True, []
NEVER = {"pickle.find_class", "exec", "compile", "import", "marshal.loads", "os.system", "subprocess.Popen", "ctypes.dlopen"}

def hook(event, args):
    header = event == "compile" and "'fortran_order'" in str(args)  # numpy parses it with ast.literal_eval: nothing runs
    if watching and event in NEVER and not header:
        seen.append((event, str(args)[:200]))

sys.addaudithook(hook)
from_torchrl(f"{folder}/pickles").into()
for name in ("dtype", "other"):
    try:
        from_torchrl(f"{folder}/{name}").into()
    except ValueError:
        continue
    raise AssertionError(name)
try:
    from_file(f"{folder}/object.npz").into()
except ValueError as error:
    assert "pickled Python objects" in str(error), error
else:
    raise AssertionError("object.npz")
watching = False
assert not seen, seen
assert not os.path.exists(f"{folder}/ran")
watching = True
pickle.loads(b"cos\\ngetcwd\\n(tR.")
watching = False
assert seen  # the hook sees
print("quiet")
"""


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.more
def test_nothing_is_unpickled_evaluated_or_imported(tmp_path):
    payload = Payload(tmp_path / "ran")
    write_ring(tmp_path / "good")
    np.savez(tmp_path / "good.npz", x=np.zeros(3, np.float32))
    np.savez(tmp_path / "object.npz", x=np.array([payload], object))
    path, _ = write_ring(tmp_path / "pickles")
    for name in ("prefetch.pkl", "transform.t", "storage/other.pickle", "storage/next/other.pickle"):
        (path / name).write_bytes(pickle.dumps(payload))
    path, _ = write_ring(tmp_path / "dtype")
    edit(path / "storage" / "meta.json", action__dtype=f"__import__('os').system('touch {tmp_path}/ran')")
    path, _ = write_ring(tmp_path / "other")
    edit(path / "storage" / "meta.json", name={"type": "NonTensorData"})
    (path / "storage" / "name").mkdir()
    (path / "storage" / "name" / "other.pickle").write_bytes(pickle.dumps(payload))
    assert "quiet" in run_python(AUDIT, tmp_path).stdout


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrl.data")


def flat(td):
    out = {}
    for key, leaf in td.items(True, True):
        name = key if isinstance(key, str) else "/".join(key)
        out[name] = (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).numpy()
    return out


def compare(buffer, state, td, order):
    got = named_leaves(buffer.rows(state).data)
    wanted = {n: x for n, x in flat(td).items() if n != "index"}
    assert sorted(got) == sorted(wanted)
    for name, leaf in wanted.items():
        assert np.array_equal(np.asarray(got[name].astype(jnp.float32)), leaf[order].astype(np.float32)), name


@pytest.mark.more
@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage", "lanes"])
def test_rows_of_a_dump(torchrl, kind, tmp_path):
    if kind == "lanes":
        storage = torchrl.LazyTensorStorage(12, ndim=2)
        data = [rollout(14).reshape(2, 7), rollout(4, 14).reshape(2, 2)]
    else:
        more = {"scratch_dir": str(tmp_path / "scratch")} if kind == "LazyMemmapStorage" else {}
        storage = getattr(torchrl, kind)(8, **more)
        data = [rollout(7), rollout(6, 7)]
    replay = torchrl.TensorDictReplayBuffer(storage=storage, batch_size=4)
    for part in data:
        replay.extend(part)
    replay.dumps(tmp_path / "dump")
    buffer, state = from_torchrl(tmp_path / "dump", dtypes={"next/reward": "float32"})
    cursor = json.loads((tmp_path / "dump" / "writer" / "metadata.json").read_text())["cursor"]
    room = 6 if kind == "lanes" else 8
    assert buffer.lanes == (2 if kind == "lanes" else None) and buffer.capacity == len(replay)
    order = (cursor + np.arange(room)) % room
    compare(buffer, state, storage._storage, order)
    pytest.raises(TypeError, lambda: from_torchrl(tmp_path / "dump")).match("leaf 'next/reward' is float64")
    if kind == "LazyMemmapStorage":
        buffer, state = from_torchrl(tmp_path / "scratch", rows=8, cursor=cursor, fields=["action"])
        assert np.array_equal(buffer.rows(state).data["action"], storage._storage["action"].numpy()[order])


@pytest.mark.more
def test_pytrees_are_read(torchrl, tmp_path):
    import torch

    replay = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(8), batch_size=4)
    replay.extend({"a": torch.arange(5), "b": {"c": torch.ones(5, 2)}})
    replay.dumps(tmp_path / "tree")
    buffer, state = from_torchrl(tmp_path / "tree")
    rows = buffer.rows(state).data
    assert rows["a"].tolist() == [0, 1, 2, 3, 4] and rows["b"]["c"].shape == (5, 2)
    replay = torchrl.ReplayBuffer(storage=torchrl.LazyTensorStorage(8), batch_size=4)
    replay.extend(torch.arange(10).reshape(5, 2))
    replay.dumps(tmp_path / "one")
    buffer, state = from_torchrl(tmp_path / "one")
    assert buffer.rows(state).data["row"].tolist() == torch.arange(10).reshape(5, 2).tolist()


PRIORITIES = """
import sys
from benchmarks.peers import _torchrl_tree
try:
    _torchrl_tree.ensure()
except ImportError as error:
    print("absent", error)
    raise SystemExit
import torch
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from tests.support.interop import rollout
replay = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(8), batch_size=4)
replay.extend(rollout(13))
replay.update_priority(torch.arange(8), torch.linspace(0.1, 2, 8))
replay.dumps(sys.argv[1])
"""


@pytest.mark.more
def test_priorities_of_a_dump(tmp_path):
    """torchrl's wheel may hold trees that do not load; then they are built."""
    pytest.importorskip("torchrl")
    if "absent" in (out := run_python(PRIORITIES, tmp_path / "dump").stdout):
        pytest.skip(out)
    buffer, state = from_torchrl(tmp_path / "dump", fields=["action"])
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    slots = dict(zip(np.fromfile(tmp_path / "dump/storage/action.memmap", np.int64).tolist(), range(8), strict=True))
    leaf = (np.linspace(0.1, 2, 8) + 1e-8) ** 0.6
    at = [slots[t] for t in np.asarray(batch.data["action"]).tolist()]
    np.testing.assert_allclose(batch.probability, leaf[at] / leaf.sum(), rtol=1e-4)
