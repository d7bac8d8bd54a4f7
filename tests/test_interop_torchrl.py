"""torchrl dumps: row by row against torchrl, and hand-made ones that are torn, lie, or would run code in its own loader."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf._tree import named_leaves
from fbuf.interop import _columns, _torchrl, from_torchrl

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 64)


# ------------------------------------------------------------------------------------------- dumps made by hand


def dump(path: Path, leaves: dict[str, np.ndarray], *, cursor: int, count: int, room: int, batch=None) -> Path:
    """What `rb.dumps` of a tensordict storage writes: leaves `[room, ...]` under names with slashes."""
    tree: dict = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = leaf

    def put(folder: Path, tree: dict) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        about: dict = {}
        for name, leaf in tree.items():
            if isinstance(leaf, dict):
                about[name] = {"type": "TensorDict"}
                put(folder / name, leaf)
                continue
            (folder / f"{name}.memmap").write_bytes(np.ascontiguousarray(leaf).tobytes())
            entry = {
                "device": "cpu",
                "shape": list(leaf.shape),
                "dtype": f"torch.{leaf.dtype.name}",
                "is_nested": False,
            }
            about[name] = entry
        about |= {"shape": batch or [room], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
        (folder / "meta.json").write_text(json.dumps(about))

    put(path / "storage", tree)
    held = min(count, room) * int(np.prod((batch or [room])[1:], dtype=int))
    (path / "storage" / "storage_metadata.json").write_text(
        json.dumps({"metadata": {}, "is_pytree": False, "len": held})
    )
    (path / "writer").mkdir()
    (path / "writer" / "metadata.json").write_text(json.dumps({"cursor": cursor, "write_count": count}))
    return path


def ring(room: int = 8, count: int = 13) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Leaves of a ring after `count` rows, and what it holds, oldest first."""
    t = np.zeros(room, np.int64)
    for i in range(count):
        t[i % room] = i
    leaves = {
        "action": t,
        "observation": np.repeat(t[:, None], 3, 1).astype(np.float32),
        "next/reward": t[:, None].astype(np.float32),
        "next/terminated": (t % 5 == 4)[:, None],
        "index": np.arange(room),
    }
    return leaves, np.arange(max(0, count - room), count)


def whole(path: Path, count: int = 13) -> tuple[Path, np.ndarray]:
    leaves, held = ring(count=count)
    return dump(path, leaves, cursor=count % 8, count=count, room=8), held


@pytest.mark.parametrize("count", [0, 5, 8, 13])
def test_rows_come_oldest_first(count, tmp_path):
    path, held = whole(tmp_path / "d", count)
    buffer, state = from_torchrl(path)
    rows = named_leaves(buffer.rows(state).data)
    assert sorted(rows) == ["action", "next/reward", "next/terminated", "observation"]
    if count:
        assert rows["action"].tolist() == held.tolist() and rows["action"].dtype == jnp.int32
        assert rows["next/terminated"][:, 0].tolist() == (held % 5 == 4).tolist()


def test_ted_once_each(tmp_path):
    path, held = whole(tmp_path / "d")
    view = fbuf.views.Transition(truncated=None)
    buffer, state = from_torchrl(path, buffer=fbuf.Buffer(20, view=view), fields="ted")
    rows = buffer.rows(state).data
    assert rows["obs"].shape == (20, 3) and rows["reward"].shape == (20,) and rows["terminated"].dtype == bool
    batch = buffer.peek(state, jax.random.key(0), 32)
    ended = np.asarray(batch.data["discount"]) == 0
    step = np.asarray(batch.data["next_obs"] - batch.data["obs"])[:, 0]
    assert (step[~ended] == 1).all() and (np.asarray(batch.data["action"])[ended] % 5 == 4).all()


def test_priorities(tmp_path):
    path, held = whole(tmp_path / "d")
    alpha, eps, td_error = 0.6, 1e-8, np.linspace(0.1, 2.0, 8)
    sampler(path, (td_error + eps) ** alpha, alpha, eps)
    buffer, state = from_torchrl(path)
    assert buffer.sampler == fbuf.samplers.Prioritized(alpha=alpha, beta=0.9)
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    leaf = ((td_error + eps) ** alpha)[np.asarray(batch.data["action"]) % 8]
    np.testing.assert_allclose(batch.probability, leaf / ((td_error + eps) ** alpha).sum(), rtol=1e-4)
    assert from_torchrl(path, priorities=False)[0].sampler == fbuf.samplers.Uniform()


def sampler(path: Path, leaves: np.ndarray, alpha: float, eps: float, **more) -> None:
    (path / "sampler").mkdir(exist_ok=True)
    about = {
        "_alpha": alpha,
        "_beta": 0.9,
        "_eps": eps,
        "_max_capacity": float(len(leaves)),
        "_max_priority": [1.0, 0.0],
    }
    (path / "sampler" / "sampler_metadata.json").write_text(json.dumps(about | more))
    (path / "sampler" / "sumtree.memmap").write_bytes(leaves.astype(np.float64).tobytes())


def test_lanes_and_windows_are_told_apart(tmp_path):
    """A storage of two axes holds lanes, or rows that are windows; its `len` and the writer's count say which."""
    leaves = {"x": np.arange(24, dtype=np.float32).reshape(6, 4)}
    buffer, state = from_torchrl(dump(tmp_path / "lanes", leaves, cursor=3, count=9, room=6, batch=[6, 4]))
    assert buffer.lanes == 4 and buffer.rows(state).data["x"][0].tolist() == [12, 13, 14, 15]
    windows = dump(tmp_path / "windows", leaves, cursor=3, count=9, room=6, batch=[6, 4])
    about = windows / "storage" / "storage_metadata.json"
    about.write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": 6}))
    buffer, state = from_torchrl(windows)
    assert buffer.lanes is None and buffer.rows(state).data["x"].shape == (6, 4)
    about.write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": 12}))
    with pytest.raises(ValueError, match="may be 4 lanes, or rows that are windows of 4 steps. Say lanes=4"):
        from_torchrl(windows)


def test_the_folder_of_a_memmap_storage(tmp_path):
    path, held = whole(tmp_path / "d")
    folder = tmp_path / "scratch"
    shutil.copytree(path / "storage", folder)
    (folder / "storage_metadata.json").unlink()
    with pytest.raises(ValueError, match="does not say how many rows it holds; expected rows="):
        from_torchrl(folder)
    buffer, state = from_torchrl(folder, rows=8, cursor=5, fields=["action"])
    assert buffer.rows(state).data["action"].tolist() == held.tolist()


# ----------------------------------------------------------------------------------------------------- damage


def edited(path: Path, **entries) -> None:
    about = json.loads(path.read_text())
    for dotted, value in entries.items():
        at = about
        *parts, last = dotted.split("__")
        for part in parts:
            at = at[part]
        at[last] = value
    path.write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("file", "entries", "match"),
    [
        ("storage/meta.json", {"action__dtype": "__import__('os').system('touch ran')"}, "dtype of action.memmap is"),
        ("storage/meta.json", {"action__dtype": "torch.object"}, "expected one such as 'torch.float32'"),
        ("storage/meta.json", {"action__dtype": "torch.int32"}, "has 64 bytes; expected 32, of int32"),
        ("storage/meta.json", {"action__shape": [2**40]}, "has 64 bytes; expected 8796093022208"),
        ("storage/meta.json", {"action__shape": [2**40, 2**40]}, "expected fewer than 2\\^62 entries"),
        ("storage/meta.json", {"action__shape": [-8]}, "an axis is '-8'"),
        ("storage/meta.json", {"action__shape": [4, 2]}, "expected \\[8, '...'\\] as the others have"),
        ("storage/meta.json", {"../evil": {"dtype": "torch.int64", "shape": [8]}}, "names a leaf '../evil'"),
        ("storage/meta.json", {"..": {"type": "TensorDict"}}, "names a leaf '..'"),
        ("storage/meta.json", {"/etc/passwd": {"dtype": "torch.uint8", "shape": [8]}}, "names a leaf '/etc/passwd'"),
        ("storage/meta.json", {"_type": "<class 'os.system'>"}, "expected a TensorDict"),
        ("storage/meta.json", {"shape": [9]}, "expected \\[9, '...'\\]"),
        ("storage/storage_metadata.json", {"len": 9}, "is said to hold 9 rows"),
        ("storage/storage_metadata.json", {"len": -1}, "len is '-1'"),
        ("storage/storage_metadata.json", {"len": "8"}, "len is '8'"),
        ("storage/storage_metadata.json", {"is_pytree": True, "metadata": {"..a": {}}}, "names a leaf"),
        ("storage/storage_metadata.json", {"is_pytree": True, "metadata": [1]}, "metadata is a list"),
        ("writer/metadata.json", {"cursor": 99}, "cursor is 99; expected 0 to 8"),
        ("writer/metadata.json", {"cursor": 1.5}, "cursor is '1.5'"),
    ],
)
def test_a_dump_that_lies_is_refused(file, entries, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = whole(tmp_path / "d")
    edited(path / file, **entries)
    with pytest.raises(ValueError, match=match):
        from_torchrl(path)
    assert not (tmp_path / "ran").exists()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**65)
    | st.floats()
    | st.sampled_from(
        ["torch.float32", "TensorDict", "cpu", "..", "a/b", "<class 'tensordict._td.TensorDict'>", "torch.load"]
    )
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["a", "next", "shape", "dtype", "type", "is_nested", "_type", "..", "len", "metadata", "is_pytree"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


FILES = ("storage/meta.json", "storage/storage_metadata.json", "writer/metadata.json", "sampler/sampler_metadata.json")


@given(value=JSON, file=st.sampled_from(FILES), data=st.data())
@settings(max_examples=150)
def test_any_description_is_read_or_refused(value, file, data, tmp_path_factory):
    """Of any JSON, or a true description with one entry changed: rows that the files hold, or an error that names the
    file; no other exception."""
    path, _ = whole(tmp_path_factory.mktemp("any") / "d")
    sampler(path, np.ones(8), 0.6, 1e-8)
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
        source, _ = _torchrl._source(path, None, None, None, True)
        for column in source.columns.values():
            if not column.refused:
                assert len(column.read(0, source.steps)) == source.steps
    except (ValueError, FileNotFoundError) as error:
        assert str(path) in str(error)


def test_a_dump_of_two_times_is_refused(tmp_path):
    """Its storage was written again and its writer was not: torchrl loads that, and goes on in the wrong place."""
    path, _ = whole(tmp_path / "d", 6)
    edited(path / "writer" / "metadata.json", cursor=4, write_count=4)
    with pytest.raises(ValueError, match="cursor is 4, but the storage holds 6 of 8 rows.*files are of two dumps"):
        from_torchrl(path)
    buffer, state = from_torchrl(path, cursor=6)
    assert buffer.rows(state).data["action"].tolist() == [0, 1, 2, 3, 4, 5]


def test_every_truncation_is_noticed(tmp_path):
    path, _ = whole(tmp_path / "d")
    for file in sorted(path.rglob("*")):
        if not file.is_file():
            continue
        text = file.read_bytes()
        for size in range(0, len(text), 7):
            file.write_bytes(text[:size])
            with pytest.raises(ValueError, match="bytes; expected|no JSON"):
                from_torchrl(path)
        file.write_bytes(text)
    from_torchrl(path)


def test_a_missing_file_is_named(tmp_path):
    path, _ = whole(tmp_path / "d")
    (path / "storage" / "next" / "reward.memmap").unlink()
    with pytest.raises(FileNotFoundError, match="reward.memmap"):
        from_torchrl(path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        from_torchrl(tmp_path / "nothing")


def test_links_are_not_followed(tmp_path):
    path, _ = whole(tmp_path / "d")
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    leaf = path / "storage" / "action.memmap"
    leaf.unlink()
    leaf.symlink_to(secret)
    with pytest.raises(ValueError, match="action.memmap: is a link"):
        from_torchrl(path)
    leaf.unlink()
    leaf.write_bytes(bytes(64))
    shutil.move(path / "storage" / "next", tmp_path / "next")
    (path / "storage" / "next").symlink_to(tmp_path / "next")
    with pytest.raises(ValueError, match="next: is a link"):
        from_torchrl(path)


def test_deep_and_large_descriptions(tmp_path):
    path, _ = whole(tmp_path / "d")
    described = path / "storage" / "meta.json"
    described.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep|no JSON"):
        from_torchrl(path)
    with open(described, "wb") as file:
        file.truncate(2**27)
    with pytest.raises(ValueError, match="expected at most 67108864"):
        from_torchrl(path)


def test_what_is_no_array_can_be_left_out(tmp_path):
    path, held = whole(tmp_path / "d")
    edited(path / "storage" / "meta.json", name={"type": "NonTensorData"}, ragged={"is_nested": True, "shape": [8]})
    folder = path / "storage" / "name"
    folder.mkdir()
    (folder / "other.pickle").write_bytes(pickle.dumps("x"))
    with pytest.raises(ValueError, match=r"leaf 'name' is a NonTensorData, in .*name/other.pickle, which is a pickle"):
        from_torchrl(path)
    with pytest.raises(ValueError, match="leaf 'ragged' is a nested tensor"):
        from_torchrl(path, fields=["ragged"])
    buffer, state = from_torchrl(path, fields=["action"])
    assert buffer.rows(state).data["action"].tolist() == held.tolist()


@pytest.mark.parametrize(
    ("more", "leaves", "match"),
    [
        ({"_alpha": "0.6"}, np.ones(8), "_alpha is '0.6'"),
        ({"_eps": float("nan")}, np.ones(8), "_eps is 'nan'"),
        ({"_max_capacity": 3.0}, np.ones(8), "there are 3 priorities; expected 8"),
        ({"_max_capacity": 9.0}, np.ones(8), "has 64 bytes; expected 72"),
        ({}, np.full(8, np.nan), "a TD error was NaN"),
        ({}, -np.ones(8), "no finite numbers >= 0"),
    ],
)
def test_priorities_that_lie(more, leaves, match, tmp_path):
    path, _ = whole(tmp_path / "d")
    sampler(path, leaves, 0.6, 1e-8, **more)
    with pytest.raises(ValueError, match=match):
        from_torchrl(path)
    from_torchrl(path, priorities=False)


def test_other_kinds_of_dumps_are_named(tmp_path):
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "data_indices.json").write_text("[0]")
    with pytest.raises(ValueError, match="has data_indices.json, of another kind of storage"):
        from_torchrl(tmp_path)


AUDIT = """
import os, pickle, sys, warnings
import numpy as np
import fbuf
from fbuf.interop import from_torchrl, from_file
folder = sys.argv[1]
from_torchrl(f"{folder}/good")  # everything that is imported or compiled once, is
from_file(f"{folder}/good.npz")
watching, seen = True, []
NEVER = {"pickle.find_class", "exec", "compile", "import", "marshal.loads", "os.system", "subprocess.Popen", "ctypes.dlopen"}

def hook(event, args):
    header = event == "compile" and "'fortran_order'" in str(args)  # numpy parses it with ast.literal_eval: nothing runs
    if watching and event in NEVER and not header:
        seen.append((event, str(args)[:200]))

sys.addaudithook(hook)
from_torchrl(f"{folder}/pickles")
for name in ("dtype", "other"):
    try:
        from_torchrl(f"{folder}/{name}")
    except ValueError:
        continue
    raise AssertionError(name)
try:
    from_file(f"{folder}/object.npz")
except ValueError as error:
    assert "Python objects, which are pickled" in str(error), error
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


def test_nothing_is_unpickled_evaluated_or_imported(tmp_path):
    """Dumps that run code in torchrl's loader are read, or refused, without it; a hook watches the interpreter."""
    payload = Payload(tmp_path / "ran")
    whole(tmp_path / "good")
    np.savez(tmp_path / "good.npz", x=np.zeros(3, np.float32))
    np.savez(tmp_path / "object.npz", x=np.array([payload], object))
    path, _ = whole(tmp_path / "pickles")
    for name in ("prefetch.pkl", "transform.t", "storage/other.pickle", "storage/next/other.pickle"):
        (path / name).write_bytes(pickle.dumps(payload))
    path, _ = whole(tmp_path / "dtype")
    edited(path / "storage" / "meta.json", action__dtype=f"__import__('os').system('touch {tmp_path}/ran')")
    path, _ = whole(tmp_path / "other")
    edited(path / "storage" / "meta.json", name={"type": "NonTensorData"})
    (path / "storage" / "name").mkdir()
    (path / "storage" / "name" / "other.pickle").write_bytes(pickle.dumps(payload))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AUDIT), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0 and "quiet" in done.stdout, done.stderr[-3000:]


# ------------------------------------------------------------------------------------------- against torchrl itself


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        pytest.importorskip("tensordict")
        return pytest.importorskip("torchrl.data")


def rollout(n: int, first: int = 0):
    import tensordict
    import torch

    t = torch.arange(first, first + n)
    after = {
        "observation": t[:, None].float().repeat(1, 3) + 1,
        "reward": t[:, None].double(),
        "done": (t % 5 == 4)[:, None],
    }
    return tensordict.TensorDict(
        {
            "observation": t[:, None].float().repeat(1, 3),
            "action": t,
            "pixels": (t[:, None] % 256).to(torch.uint8).repeat(1, 4),
            "half": t.to(torch.bfloat16),
            "next": after,
        },
        [n],
    )


def flat(td) -> dict[str, np.ndarray]:
    """Leaves of a tensordict by name, as numpy; bfloat16 as float32."""
    out = {}
    for key, leaf in td.items(True, True):
        name = key if isinstance(key, str) else "/".join(key)
        out[name] = (leaf.float() if str(leaf.dtype) == "torch.bfloat16" else leaf).numpy()
    return out


def compare(buffer, state, td, order) -> None:
    got = named_leaves(buffer.rows(state).data)
    wanted = {n: x for n, x in flat(td).items() if n != "index"}
    assert sorted(got) == sorted(wanted)
    for name, leaf in wanted.items():
        assert np.array_equal(np.asarray(got[name].astype(jnp.float32)), leaf[order].astype(np.float32)), name


@pytest.mark.parametrize("kind", ["LazyTensorStorage", "LazyMemmapStorage", "lanes"])
def test_rows_of_torchrl(torchrl, kind, tmp_path):
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
    # the priorities' casts are asked for: rewards are float64
    buffer, state = from_torchrl(tmp_path / "dump", dtypes={"next/reward": "float32"})
    cursor = json.loads((tmp_path / "dump" / "writer" / "metadata.json").read_text())["cursor"]
    room = 6 if kind == "lanes" else 8
    assert buffer.lanes == (2 if kind == "lanes" else None) and buffer.capacity == len(replay)
    order = (cursor + np.arange(room)) % room
    compare(buffer, state, storage._storage, order)
    with pytest.raises(TypeError, match="leaf 'next/reward' is float64"):
        from_torchrl(tmp_path / "dump")
    if kind == "LazyMemmapStorage":
        buffer, state = from_torchrl(tmp_path / "scratch", rows=8, cursor=cursor, fields=["action"])
        assert np.array_equal(buffer.rows(state).data["action"], storage._storage["action"].numpy()[order])


def test_a_pytree_of_torchrl(torchrl, tmp_path):
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


def test_text_of_torchrl_is_left_out(torchrl, tmp_path):
    replay = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(8), batch_size=4)
    replay.extend(rollout(5).set_non_tensor("name", "hello"))
    replay.dumps(tmp_path / "dump")
    with pytest.raises(ValueError, match="leaf 'name' is a NonTensor"):
        from_torchrl(tmp_path / "dump", dtypes={"next/reward": "float32"})
    assert from_torchrl(tmp_path / "dump", fields=["action"])[0].capacity == 5


@pytest.mark.slow
def test_priorities_of_torchrl(tmp_path):
    """With torchrl's own trees, which its wheel may bring in a form that does not load: then they are built."""
    pytest.importorskip("torchrl")
    code = f"""
    from benchmarks.peers import _torchrl_tree
    try:
        _torchrl_tree.ensure()
    except ImportError as error:
        print("absent", error)
        raise SystemExit
    import torch
    from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
    from tests.test_interop_torchrl import rollout
    replay = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(8), batch_size=4)
    replay.extend(rollout(13))
    replay.update_priority(torch.arange(8), torch.linspace(0.1, 2, 8))
    replay.dumps({str(tmp_path / "dump")!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "absent" in done.stdout:
        pytest.skip(done.stdout)
    buffer, state = from_torchrl(tmp_path / "dump", fields=["action"])
    _, batch = buffer.sample(state, jax.random.key(0), 256)
    slots = dict(zip(np.fromfile(tmp_path / "dump/storage/action.memmap", np.int64).tolist(), range(8), strict=True))
    leaf = (np.linspace(0.1, 2, 8) + 1e-8) ** 0.6
    at = [slots[t] for t in np.asarray(batch.data["action"]).tolist()]
    np.testing.assert_allclose(batch.probability, leaf[at] / leaf.sum(), rtol=1e-4)
