"""Batches of torchrl's buffers with compressed storages equal those with `LazyTensorStorage`, bit for bit."""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pytest

from benchmarks.peers import _torchrl_tree
from fbuf import StoreCorrupted
from tests.support.processes import run_python
from tests.support.refusals import raises

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

try:
    _torchrl_tree.ensure()
except ImportError:
    TREES = False  # neither the wheel's nor built
else:
    TREES = True

from tensordict import LazyStackedTensorDict, TensorDict  # noqa: E402
from torchrl.data import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer  # noqa: E402
from torchrl.data.replay_buffers import samplers, writers  # noqa: E402
from torchrl.envs.transforms import Compose, RewardScaling, ToTensorImage  # noqa: E402

from fbuf.integrations import torchrl  # noqa: E402

pytestmark = pytest.mark.more

DTYPES = """uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64 float8_e4m3fn complex64
complex128""".split()


def steps(number, seed, lanes=()):
    """Return rows `[number, *lanes]`: stacks of frames and episodes of some ten steps."""
    rng = np.random.default_rng(seed)
    frames = torch.from_numpy(rng.integers(0, 255, (number + 5, *lanes, 12, 12)).astype(np.uint8))
    stacks = torch.stack([frames[i : number + 1 + i] for i in range(4)], dim=1 + len(lanes))
    done = torch.from_numpy(rng.random((number, *lanes, 1)) < 0.1)
    final = torch.where(done[..., None, None], 0, stacks[1:])
    episode = done.cumsum(0)[..., 0] + 1000 * seed
    after = {"pixels": final, "reward": torch.from_numpy(rng.random((number, *lanes, 1), np.float32)), "done": done}
    deep = {"map": torch.from_numpy(rng.random((number, *lanes, 30))), "id": episode}
    return TensorDict({"pixels": stacks[:-1], "next": after, "deep": deep}, [number, *lanes])


def bits(value):
    return value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same(one, other):
    assert one.batch_size == other.batch_size and set(one.keys(True, True)) == set(other.keys(True, True))
    for key, value in one.items(True, True):
        found = other.get(key)
        assert value.shape == found.shape and value.dtype == found.dtype and value.device == found.device
        assert bits(value) == bits(found.clone()), key


def pair(size=60, kind=ReplayBuffer, ndim=1, **settings):
    made = []
    for storage in (LazyTensorStorage(size, ndim=ndim), torchrl.CompressedStorage(size, ndim=ndim, min_bytes=200)):
        own = {name: value() if callable(value) else value for name, value in settings.items()}
        made.append(kind(storage=storage, batch_size=24, generator=torch.Generator().manual_seed(0), **own))
    return made[0], made[1]


def extend_both(one, other, rows):
    for buffer in (one, other):
        buffer.extend(rows)


def sample_both(one, other, seed=0):
    batches = []
    for buffer in (one, other):
        torch.manual_seed(seed)
        np.random.seed(seed)
        batches.append(buffer.sample())
    same(*batches)
    return batches[0], batches[1]


def filled(size=60, number=85, **settings):
    one, other = pair(size, **settings)
    for seed in range(number // 17):
        extend_both(one, other, steps(17, seed))
    return one, other


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_streams(kind):
    one, other = pair(kind=kind)
    for seed, number in enumerate((17, 1, 30, 45, 60, 3, 1, 1, 29)):
        rows = steps(number, seed)
        for buffer in (one, other):
            buffer.extend(rows)
            for i in range(3):
                buffer.add(rows[-1 - i % number])
        _, batch = sample_both(one, other, seed)
        assert type(batch["pixels"]) is torch.Tensor
        same(one[:], other[:])
        same(one[3], other[3])
    assert isinstance(other._storage._storage["next", "reward"], torch.Tensor)
    stored = other._storage.nbytes
    assert stored > 60 * 30 * 8 and other._storage._storage["pixels"].shape == (60, 4, 12, 12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    rng, kind = np.random.default_rng(0), getattr(torch, dtype)
    one, other = pair(20)
    for _ in range(4):
        size = 1 if dtype == "bool" else kind.itemsize
        high = 2 if dtype == "bool" else 256
        raw = torch.from_numpy(rng.integers(0, high, (8, 3, 250 * size)).astype(np.uint8))
        value = raw.view(kind) if dtype != "bool" else raw.bool()  # NaN and -0.0 among them
        rows = TensorDict({"x": value[:7], "next": {"x": value[1:]}}, [7])
        for buffer in (one, other):
            buffer.extend(rows)
            buffer.add(rows[2])
        sample_both(one, other)
    same(one[:], other[:])
    assert type(other._storage._storage["next", "x"]) is torchrl._Rows


def test_rows_of_several_dimensions():
    one, other = pair(60, ndim=2)
    for seed, number in enumerate((7, 1, 20, 5)):
        rows = steps(number, seed, (3,))
        extend_both(one, other, rows.transpose(0, 1))
        sample_both(one, other, seed)
        same(one[:], other[:])
    place = torch.tensor([1, 5, 5]), torch.tensor([2, 0, 1])
    for buffer in (one, other):  # some lanes of some steps
        buffer._storage._storage[place] = steps(3, 9)
        buffer._storage._storage["next", "pixels"][4, 1] = 7
        buffer._storage[2:5] = rows[:3]
    for index in (place, 4, slice(3, 9), (slice(None), 1), (torch.tensor([3, 1]),)):
        same(one._storage[index], other._storage[index])
    same(one._storage.flatten()[:], other._storage.flatten()[:])


EPISODES = {"traj_key": ("deep", "id"), "strict_length": False}
SAMPLERS = {
    "RandomSampler": samplers.RandomSampler,
    "SamplerWithoutReplacement": samplers.SamplerWithoutReplacement,
    "ends": lambda: samplers.SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False),
    "episodes": lambda: samplers.SliceSampler(num_slices=4, **EPISODES),
    "each once": lambda: samplers.SliceSamplerWithoutReplacement(num_slices=4, **EPISODES),
}
PRIORITIZED = {
    "PrioritizedSampler": lambda: samplers.PrioritizedSampler(60, 0.7, 0.5),
    "PrioritizedSliceSampler": lambda: samplers.PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=3, **EPISODES),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept")  # torch's own
@pytest.mark.parametrize("name", [*SAMPLERS, *PRIORITIZED])
def test_samplers(name, monkeypatch):
    if name in PRIORITIZED and not TREES:
        pytest.skip("torchrl's trees neither load nor can be built")
    one, other = pair(kind=TensorDictReplayBuffer, sampler=(SAMPLERS | PRIORITIZED)[name])
    read = []
    original = torchrl._Leaf.read
    monkeypatch.setattr(torchrl._Leaf, "read", lambda *args: read.append(args[1].size) or original(*args))
    for seed in range(7):
        extend_both(one, other, steps(17, seed))
        for _ in range(2):
            for buffer, batch in zip((one, other), sample_both(one, other, seed), strict=True):
                if name in PRIORITIZED:
                    buffer.update_priority(batch["index"], batch["next", "reward"].flatten())
    assert max(read) <= 24  # rows of the batch, and none to find episodes


def test_a_writer_in_any_order():
    writer = partial(writers.TensorDictMaxValueWriter, rank_key=("next", "reward"))
    one, other = pair(kind=TensorDictReplayBuffer, writer=writer)
    for seed in range(12):
        extend_both(one, other, steps(40, seed))
        same(one[:], other[:])
    sample_both(one, other)


def test_rows_are_assigned_anywhere():
    one, other = filled()
    rng = np.random.default_rng(0)
    for seed in range(20):
        index = rng.permutation(60)[:5].tolist()
        rows = steps(5, 50 + seed)
        for buffer in (one, other):
            buffer[index] = rows
            buffer[torch.tensor(index)] = rows
            if seed % 3 == 0:
                buffer._storage[index] = rows.select("pixels")  # the next pixels stay
                buffer.extend(rows[: 1 + seed])
        same(one[:], other[:])
    for change in (
        lambda b: b[:]["pixels"].zero_(),
        lambda b: b[10:20]["next", "pixels"].add_(3),
        lambda b: b[:].set_at_("pixels", torch.ones(2, 4, 12, 12, dtype=torch.uint8), [3, 4]),
        lambda b: b.set_at_(("next", "pixels"), torch.ones(4, 12, 12, dtype=torch.uint8), 5),
        lambda b: b[:]["deep", "map"][7:9].copy_(torch.zeros(2, 30)),
        lambda b: b[:]["deep", "map"].__setitem__((slice(None), 2), 0.5),
        lambda b: torch.add(b[:]["deep", "map"], 1, out=b[:]["deep", "map"]),
    ):
        for buffer in (one, other):
            change(buffer)
        same(one[:], other[:])


def test_transforms_and_ensembles():
    parts = ToTensorImage(in_keys=["pixels"]), RewardScaling(0.5, 2.0, in_keys=[("next", "reward")])
    sample_both(*filled(transform=lambda: Compose(*(part.clone() for part in parts))))
    batches = []
    for buffers in zip(filled(), filled(60, 34), strict=True):
        both = ReplayBufferEnsemble(*buffers, batch_size=20, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        batches.append(both.sample())
    same(*batches)


def refill(one, other):
    for seed in range(20, 24):
        extend_both(one, other, steps(11, seed))
        same(one[:], other[:])


@pytest.mark.parametrize("number", [34, 85])
def test_dumps_and_loads(number, tmp_path):
    one, other = filled(number=number)
    for name, buffer in (("theirs", one), ("ours", other)):
        buffer.dumps(tmp_path / name)
    assert not list((tmp_path / "ours" / "storage").rglob("pixels*"))
    for name in ("theirs", "ours"):
        expected = copy.deepcopy(one)
        for loaded in (pair()[1], filled(number=51)[1]):  # new, and with other rows
            loaded.loads(tmp_path / name)
            same(expected[:], loaded[:])
        refill(expected, loaded)
    other.dumps(tmp_path / "ours")  # again
    raises(ValueError, "of 60 rows; expected 30", lambda: pair(30)[1].loads(tmp_path / "ours"))


def test_damaged_dumps_are_noticed(tmp_path):
    _, other = filled()
    other.dumps(tmp_path)
    for path in (tmp_path / "storage" / "compressed").glob("data*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2 :: 997] = bytes(len(data[len(data) // 2 :: 997]))
        path.write_bytes(data)
    raises(StoreCorrupted, None, lambda: pair()[1].loads(tmp_path))


def copies(buffer):
    yield copy.deepcopy(buffer)
    yield pickle.loads(pickle.dumps(buffer))
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    loaded = pair()[1]
    loaded.load_state_dict(torch.load(file, weights_only=False))
    yield loaded


def test_copies_are_independent_and_a_buffer_is_emptied():
    one, other = filled()
    for found in copies(other):
        same(one[:], found[:])
        refill(copy.deepcopy(one), found)
        same(one[:], other[:])
    for buffer in (one, other):
        buffer.empty()
        assert len(buffer) == 0
    refill(one, other)


def test_states_are_exchanged_with_torchrls_storage():
    one, other = filled()
    for source, target in ((one, pair()[1]), (other, pair()[0]), (other, filled(number=34)[1]), (one, filled()[1])):
        state = source.state_dict()
        if not isinstance(target._storage, torchrl.CompressedStorage):
            state = copy.deepcopy(state)  # older releases of torchrl go on with the tensors of the state
        target.load_state_dict(state)
        same(one[:], target[:])
        refill(copy.deepcopy(one), target)


def test_tensors_trees_and_lists_of_rows():
    rows = torch.arange(7 * 300, dtype=torch.float32).reshape(7, 300)
    for value in (rows, {"a": rows, "b": (rows[:, :2], rows.long())}):
        one, other = pair(10)
        for _ in range(3):
            for buffer in (one, other):
                buffer.extend(value)
                buffer.extend([torch.utils._pytree.tree_map(lambda x, i=i: x[i], value) for i in range(3)])
            for leaf, found in zip(*(torch.utils._pytree.tree_leaves(b.sample()) for b in (one, other)), strict=True):
                assert type(found) is torch.Tensor and torch.equal(leaf, found)
    one, other = pair()
    for seed in range(4):
        for buffer in (one, other):
            buffer.extend(list(steps(20, seed).unbind(0)))
            buffer.extend(LazyStackedTensorDict(*steps(5, seed).unbind(0)))
        same(one[:], other[:])


def test_slices_are_read_when_they_are_used():
    one, other = filled()
    lazy, index = other[:]["pixels"], torch.tensor([4, 2])
    assert lazy.shape == (60, 4, 12, 12) and isinstance(lazy[3:9][::2], torchrl._Rows)
    later = lazy[index + 25]
    extend_both(one, other, steps(17, 90))
    plain = one[:]["pixels"]
    assert torch.equal(plain, lazy) and not torch.equal(plain[index + 25], later)
    np.testing.assert_array_equal(np.asarray(lazy), plain)
    assert lazy.tolist() == plain.tolist() and repr(lazy) == repr(plain) and len(lazy) == 60
    assert torch.equal(torch.cat([lazy, lazy]).float().mean(0), torch.cat([plain, plain]).float().mean(0))
    for key in (-1, ..., (3, 2), (slice(None), 2), (..., 5), torch.arange(60) % 2 == 0, [1, 2], None, plain[:] > 100):
        assert torch.equal(lazy[key], plain[key])
    raises(IndexError, None, lambda: lazy[60])


def test_another_process_is_refused():
    _, other = filled()
    process = torch.multiprocessing.get_context("spawn").Process(target=print, args=(other._storage,))
    raises(RuntimeError, "expected one process", process.start)


def test_no_backend_of_jax_is_started_and_frames_are_stored_once():
    run_python("""
        import torch
        from jax._src import xla_bridge
        from tensordict import TensorDict
        from torchrl.data import ReplayBuffer
        from fbuf.integrations.torchrl import CompressedStorage

        frames = torch.randint(0, 4, (403, 84, 84), dtype=torch.uint8)
        stacks = torch.stack([frames[i : 400 + i] for i in range(4)], 1)
        buffer = ReplayBuffer(storage=CompressedStorage(400), batch_size=32)
        buffer.extend(TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:]}}, [399]))
        buffer.sample()
        assert buffer._storage.nbytes < 400 * 84 * 84, buffer._storage.nbytes
        assert not xla_bridge.backends_are_initialized()
    """)
