"""Batches of the compressed buffers of Stable-Baselines3 equal those of its own, bit for bit."""

import copy
import itertools
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from fbuf import StoreCorrupted
from tests.support.processes import run_python
from tests.support.refusals import raises

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")

from stable_baselines3.common import buffers as theirs  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

from fbuf.integrations import sb3  # noqa: E402

pytestmark = pytest.mark.more

ACTIONS = spaces.Discrete(4)
CLASSES = {
    theirs.ReplayBuffer: sb3.CompressedReplayBuffer,
    theirs.NStepReplayBuffer: sb3.CompressedNStepReplayBuffer,
    theirs.DictReplayBuffer: sb3.CompressedDictReplayBuffer,
}
DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"]


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts if part is not None for leaf in leaves(part)]


def same(one, other):
    for a, b in zip(leaves(one), leaves(other), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.numpy().tobytes() == b.numpy().tobytes()


def same_batches(one, other, seed, size=24, env=None):
    batches = []
    for buffer in (one, other):
        np.random.seed(seed)
        batches.append(buffer.sample(size, env=env))
    same(*batches)


def pair(kind, space, size, n_envs=1, **settings):
    made = CLASSES[kind](size, space, ACTIONS, "cpu", n_envs, min_bytes=1, **settings)
    settings.pop("optimize_memory_usage", None)
    return kind(size, space, ACTIONS, "cpu", n_envs, **settings), made


def add_both(one, other, *step):
    for buffer in (one, other):
        buffer.add(*step)


def stacks(n_envs, ends, seed, side=20):
    rng = np.random.default_rng(seed)
    stack = np.zeros((n_envs, 4, side, side), np.uint8)
    for t in itertools.count():
        frame = np.full((n_envs, 1, side, side), t % 256, np.uint8)
        frame[np.arange(n_envs), 0, rng.integers(0, side, n_envs)] = 255
        following = np.concatenate([stack[:, 1:], frame], axis=1)
        done = rng.random(n_envs) < ends
        infos = [{"TimeLimit.truncated": bool(d and rng.random() < 0.5)} for d in done]
        yield stack, following, rng.integers(0, 4, n_envs), rng.random(n_envs), done, infos
        stack = following.copy()
        stack[done] = 0
        stack[done, -1] = rng.integers(0, 255, (side, side))


@pytest.mark.parametrize("kind", [theirs.ReplayBuffer, theirs.NStepReplayBuffer])
@pytest.mark.parametrize(("n_envs", "ends"), [(1, 0.05), (2, 0.0), (3, 0.3), (4, 1.0)])
def test_streams_with_ends_and_timeouts(kind, n_envs, ends):
    space = spaces.Box(0, 255, (4, 20, 20), np.uint8)
    one, other = pair(kind, space, 60 * n_envs, n_envs, optimize_memory_usage=True, handle_timeout_termination=True)
    for t, step in enumerate(itertools.islice(stacks(n_envs, ends, n_envs), 200)):
        add_both(one, other, *step)
        if t % 13 == 3:
            same_batches(one, other, t)
        if t % 50 == 40:
            other = pickle.loads(pickle.dumps(other)) if t % 100 == 40 else copy.deepcopy(other)
    assert one.pos == other.pos and one.size() == other.size()
    np.testing.assert_array_equal(one.observations, other.observations)
    np.testing.assert_array_equal(one.next_observations, other.next_observations)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_in_any_order(dtype):
    rng, kind = np.random.default_rng(0), np.dtype(dtype)
    limits = np.finfo(kind) if kind.kind == "f" else np.iinfo(kind)
    one, other = pair(theirs.ReplayBuffer, spaces.Box(limits.min, limits.max, (7,), kind), 80, 2)
    for t in range(150):
        bits = rng.integers(0, 256, (2, 2, 7 * kind.itemsize), np.uint8)
        observation, following = bits.view(kind)  # NaN and -0.0 among them
        add_both(one, other, observation, following, np.zeros(2), np.ones(2), np.zeros(2), [{}, {}])
        if t % 30 == 29:
            same_batches(one, other, t)
    for name in ("observations", "next_observations"):
        assert np.asarray(getattr(other, name)).tobytes() == getattr(one, name).tobytes()


@pytest.mark.parametrize("space", [spaces.Discrete(9), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(5)])
def test_spaces_that_are_no_boxes(space):
    space.seed(0)
    one, other = pair(theirs.ReplayBuffer, space, 30, 2)
    for t in range(50):
        step = [np.stack([space.sample() for _ in range(2)]) for _ in range(2)]
        add_both(one, other, *step, np.zeros(2), np.ones(2), np.zeros(2), [{}, {}])
        same_batches(one, other, t)
    actions = spaces.Box(-1, 1, (2,), np.float64)
    one, other = (kind(5, space, actions, "cpu") for kind in (theirs.ReplayBuffer, sb3.CompressedReplayBuffer))
    assert one.actions.dtype == other.actions.dtype == np.float32 and one.actions.shape == other.actions.shape


def test_dictionaries():
    space = spaces.Dict({"image": spaces.Box(0, 255, (4, 20, 20), np.uint8), "goal": spaces.Box(-1, 1, (3,))})
    one = theirs.DictReplayBuffer(100, space, ACTIONS, "cpu", 2)
    other = sb3.CompressedDictReplayBuffer(100, space, ACTIONS, "cpu", 2, optimize_memory_usage=True)
    assert isinstance(other.observations["goal"], np.ndarray)  # it is small
    for t, (first, following, *rest) in enumerate(itertools.islice(stacks(2, 0.1, 0), 120)):
        goal = np.full((2, 3), t, np.float32)
        add_both(one, other, {"image": first, "goal": goal}, {"image": following, "goal": goal + 1}, *rest)
        if t % 20 == 5:
            same_batches(one, other, t)
            other = pickle.loads(pickle.dumps(other))
    assert other.nbytes < 2 * one.observations["image"].nbytes


def test_observations_are_normalised_by_vec_normalize():
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]))
    one, other = pair(theirs.ReplayBuffer, env.observation_space, 50)
    observation = env.reset()
    for t in range(80):
        _, reward, done, infos = env.step(np.array([t % 2]))
        following = env.get_original_obs()
        add_both(one, other, observation, following, np.array([t % 2]), reward, done, infos)
        observation = following
    same_batches(one, other, 0, env=env)


def filled(size=40, steps=50, **settings):
    one, other = pair(theirs.ReplayBuffer, spaces.Box(0, 255, (4, 20, 20), np.uint8), 2 * size, 2, **settings)
    for step in itertools.islice(stacks(2, 0.1, 1), steps):
        add_both(one, other, *step)
    return one, other


ROWS, LANES = np.array([1, 5, 5]), np.array([0, 1, 1])
INDICES = [*np.s_[3, -1, 2:9:3, ...], np.int64(5), [1, 2, 2], np.array([-1, 4]), np.arange(40) % 3 == 0]
INDICES += [np.s_[4, 1], np.s_[..., 2], np.s_[:, 0], np.s_[:5, :, 3, 2:7], np.s_[None, 3, 1], np.s_[3, ..., [0, 2]]]
INDICES += [np.s_[3, 1, 2, 5, 6], (3, 1, None, np.int64(2)), np.zeros(0, int)]
INDICES += [(np.array([[1, 2], [3, 4]]), np.array([0, 1]))]
INDICES += [np.s_[ROWS, LANES, :], np.s_[ROWS[:2], LANES[:2], 2], (np.array([-1, -40, 3]), np.array([0, -1, -2]))]
INDICES += [(np.array([9, 3]), np.array([-1, -2])), (np.array([9, 3]), np.array([1, 0]), np.array([1, 2]))]
INDICES += [np.s_[:, LANES[:2], :, 2], (np.arange(80).reshape(40, 2) % 3 == 0, 2)]


@pytest.mark.parametrize("steps", [25, 50])
def test_observations_are_indexed_like_an_array(steps):
    buffers = filled(steps=steps)
    for name in ("observations", "next_observations"):
        one, other = (getattr(buffer, name) for buffer in buffers)
        assert one.shape == other.shape and one.dtype == other.dtype and len(one) == len(other) == 40
        for index in INDICES:
            np.testing.assert_array_equal(one[index], other[index], err_msg=str(index))


def test_invalid_indices_and_assignments_are_refused():
    one, other = filled(steps=45)
    assert len(list(other.observations)) == 40  # iteration ends
    for index in (40, -41, (0, 2), (np.array([40]), np.array([0]))):
        raises(IndexError, None, one.observations.__getitem__, index)
        raises(IndexError, None, other.observations.__getitem__, index)
    with pytest.raises(IndexError, match="expected row 5"):
        other.observations[3] = 0
    with pytest.raises(IndexError, match="before observations"):
        other.next_observations[5] = 0
    nested = spaces.Dict({"image": spaces.Box(0, 255, (4, 20, 20), np.uint8)})
    pytest.raises(ValueError, sb3.CompressedReplayBuffer, 10, nested, ACTIONS).match("CompressedDictReplayBuffer")
    with pytest.raises(ValueError, match="Use CompressedReplayBuffer"):
        sb3.CompressedDictReplayBuffer(10, nested["image"], ACTIONS)


@pytest.mark.parametrize("steps", [0, 20, 45])
def test_add_is_repeated_after_it_failed(steps):
    one, other = filled(steps=steps)
    for t, (first, following, *rest) in enumerate(itertools.islice(stacks(2, 0.1, 4), 30)):
        for buffer in (one, other):
            with pytest.raises(ValueError, match="broadcast"):
                buffer.add(first + 1, following + t, rest[0], np.zeros(5), *rest[2:])
            np.testing.assert_array_equal(buffer.observations[buffer.pos], first + 1)
            buffer.add(first, following, *rest)
    np.testing.assert_array_equal(one.observations, other.observations)
    np.testing.assert_array_equal(one.next_observations, other.next_observations)


def test_rows_read_ahead_are_returned_for_their_index_only_and_until_they_are_replaced():
    one, other = filled(steps=40)
    at, lane = np.array([0, 1]), np.array([0, 0])
    for index in ((at, lane + 1), (at + 1, lane)):
        other.next_observations[at, lane]
        np.testing.assert_array_equal(other.observations[index], one.observations[index])
    other.next_observations[at, lane]  # reads the observations too
    for step in itertools.islice(stacks(2, 0.1, 3), 5):
        add_both(one, other, *step)
    np.testing.assert_array_equal(other.observations[at, lane], one.observations[at, lane])


def test_a_reset_buffer_is_empty_and_batches_share_no_memory():
    one, other = filled(steps=45)
    other.sample(4)
    one.reset()
    other.reset()
    assert not np.asarray(other.observations).any()
    for step in itertools.islice(stacks(2, 0.1, 2), 7):
        add_both(one, other, *step)
    same_batches(one, other, 0)
    array = other.observations[np.array([3]), np.array([0])]
    first, second = other.to_torch(array), other.to_torch(array)
    first += 1
    assert not torch.equal(first, second)
    batch, again = other.sample(8), other.observations[:].copy()
    batch.observations.zero_()
    batch.next_observations.zero_()
    np.testing.assert_array_equal(other.observations, again)


def test_damaged_pickles_are_noticed():
    _, buffer = filled(size=400, steps=420)
    state = buffer.observations._shared.pairs.__getstate__()
    name = next(n for n, a in state["arrays"].items() if n.endswith("payload") and a.size)
    state["arrays"][name] = state["arrays"][name].copy()
    state["arrays"][name][state["arrays"][name].size // 2] ^= 1
    buffer.observations._shared.pairs.__setstate__(state)
    pytest.raises(StoreCorrupted, lambda: buffer.observations[:])


def test_no_backend_of_jax_is_started_and_nothing_is_printed():
    done = run_python("""
        import numpy as np
        from gymnasium import spaces
        from jax._src import xla_bridge
        from fbuf.integrations.sb3 import CompressedReplayBuffer

        space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
        buffer = CompressedReplayBuffer(100, space, spaces.Discrete(2), "cpu", optimize_memory_usage=True)
        zeros = np.zeros((1, 4, 84, 84), np.uint8)
        for _ in range(120):
            buffer.add(zeros, zeros, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
        buffer.sample(32)
        assert not xla_bridge.backends_are_initialized()
    """)
    assert not done.stdout
