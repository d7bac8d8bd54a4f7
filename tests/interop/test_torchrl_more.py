"""torchrl dumps that torchrl wrote, row by row and priority by priority."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._core.pytree import named_leaves
from tests.interop.test_torchrl import small_blocks  # noqa: F401
from tests.support.interop import from_torchrl
from tests.support.processes import run_python

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def torchrl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchrl.data")


def rollout(n, first=0):
    import tensordict
    import torch

    t = torch.arange(first, first + n)
    obs = t[:, None].float().repeat(1, 3)
    after = {"observation": obs + 1, "reward": t[:, None].double(), "done": (t % 5 == 4)[:, None]}
    rows = {"observation": obs, "action": t, "half": t.to(torch.bfloat16), "next": after}
    return tensordict.TensorDict(rows | {"pixels": (t[:, None] % 256).to(torch.uint8).repeat(1, 4)}, [n])


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
from tests.interop.test_torchrl_more import rollout
replay = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(8), batch_size=4)
replay.extend(rollout(13))
replay.update_priority(torch.arange(8), torch.linspace(0.1, 2, 8))
replay.dumps(sys.argv[1])
"""


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
