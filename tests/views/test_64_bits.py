"""64-bit rewards and episode ids that views read without x64: against a buffer under x64 with ids of 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Host, Memmap
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.support.tables import by_tier
from tests.support.trees import same, x64

pytestmark = pytest.mark.more

KEYS = ("id", "reward")
STORAGES = {
    "host": lambda path: Host(keys=KEYS),
    "compressed": lambda path: Compressed(keys=KEYS),
    "memmap": lambda path: Memmap(str(path / "rows"), keys=(*KEYS, "n")),
}
STEPS, LANES = 40, 2
NO_FLAGS = {"terminated": None, "truncated": None, "episode": "id"}
IDS = np.array([0, 5, 5 + 2**32, -6 + 2**32, -6])  # neighbours differ in one half alone; missing rows have 0
REWARDS = np.array([1.0, -(2.0**20) - 2.0**-40, 3.0 + 2.0**-30, 0.1, 2.0**-120, 16777217.0, -7.0])


def reached(achieved, goal):
    return (achieved >= goal).astype(jnp.float32)


VIEWS = {
    "transition": Transition(**NO_FLAGS),
    "n_step": Transition(n_step=3, gamma=0.5, **NO_FLAGS),
    "hindsight": Hindsight(Transition(n_step=2, gamma=0.5, **NO_FLAGS), reached, "obs/goal", "obs/achieved"),
    "sequence": Sequence(4, boundary="mask", episode_end=(), episode="id"),
    "cross": Sequence(4, burn_in=1, stride=2, boundary="cross", episode_end=(), episode="id"),
    "episode": Episode(12, episode_end=(), episode="id"),
}


def rows_of(dtype, seed=0):
    """Return rows with the number of the id of each, int32, and rewards that round."""
    rng = np.random.default_rng(seed)
    number = 1 + np.cumsum(rng.random((STEPS, LANES)) < 0.3, axis=0, dtype=np.int32) % 4
    integers = rng.integers(-(2**60), 2**60, (STEPS, LANES))
    reward = rng.choice(REWARDS, (STEPS, LANES)) if dtype == "float64" else integers
    n = np.arange(STEPS * LANES, dtype=np.float32).reshape(STEPS, LANES)
    obs = {"goal": n + 1000, "achieved": n}
    return {"id": number, "reward": reward.astype(dtype), "obs": obs, "action": n, "n": n}


def batch_of(view, storage, rows, way):
    buffer = fbuf.Buffer(48, lanes=LANES, storage=storage, view=view)
    example = jax.tree.map(lambda x: x[0, 0], rows)
    parts = [jax.tree.map(lambda x, part=part: x[slice(*part)], rows) for part in ((0, 7), (7, 8), (8, STEPS))]
    if way == "replay":
        replay = fbuf.Replay(buffer, example)
        for part in parts:
            replay.extend(part)
        return replay.buffer.sample(replay.state, jax.random.key(3), 24)[1].data
    state = buffer.init(example)
    for part in parts:
        state = buffer.extend(state, part)
    return buffer.sample(state, jax.random.key(3), 24)[1].data


def compare(view, got, wanted, rounded):
    """Compare a batch with one under x64; `rounded` is that of rewards that float32 holds."""
    if "discount" in got:
        reward, discount = got.pop("reward"), got.pop("discount")
        del wanted["reward"], wanted["discount"]
        assert reward.dtype == discount.dtype == np.float32
        wrong = 0 if VIEWS[view] == VIEWS["transition"] else 1e-6 * np.abs(rounded["reward"]).max()
        np.testing.assert_allclose(reward, np.asarray(rounded["reward"], np.float32), rtol=0, atol=wrong)
        np.testing.assert_array_equal(discount, np.asarray(rounded["discount"], np.float32))
    ids = IDS[np.asarray(wanted.pop("id"))]
    same(got.pop("id"), ids)
    same(got, wanted)


CASES = [
    ("transition", "host", "float64"),
    ("transition", "memmap", "uint64"),
    ("n_step", "compressed", "float64"),
    ("n_step", "host", "int64"),
    ("hindsight", "host", "float64"),
    ("hindsight", "compressed", "int64"),
    ("sequence", "host", "float64"),
    ("cross", "memmap", "float64"),
    ("episode", "compressed", "float64"),
]


@pytest.mark.parametrize(
    ("view", "storage", "dtype"), by_tier(more=CASES[::2], exhaustive=CASES[1::2], ids=lambda *case: "-".join(case))
)
def test_batches_are_those_under_x64(view, storage, dtype, tmp_path):
    rows = rows_of(dtype)
    way = "replay" if storage == "compressed" else "buffer"
    got = batch_of(VIEWS[view], STORAGES[storage](tmp_path / "one"), rows | {"id": IDS[rows["id"]]}, way)
    with x64():
        wanted = batch_of(VIEWS[view], STORAGES[storage](tmp_path / "two"), rows, way)
        if dtype == "float64":
            rows = rows | {"reward": rows["reward"].astype(np.float32).astype(np.float64)}
        rounded = batch_of(VIEWS[view], Host(keys=KEYS), rows, way)
    compare(view, got, wanted, rounded)
