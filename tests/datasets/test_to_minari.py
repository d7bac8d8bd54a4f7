"""Episodes written as Minari data sets: read back by the `minari` package, and by `fbuf.datasets.minari`."""

import tracemalloc

import jax
import jax.numpy as jnp
import minari as package
import numpy as np
import pytest
from gymnasium import spaces

import fbuf
from tests.support import datasets_oracle as oracle
from tests.support.minari_spaces import spaces_of

pytestmark = pytest.mark.more

OBSERVATION, ACTION = spaces_of("nested")
SPACES = {"observation_space": OBSERVATION, "action_space": ACTION}
OBS = {"obs/image": ((40, 36, 3), np.uint8), "obs/pair/0": ((), np.int32), "obs/pair/1": ((5,), np.int8)}
ACT = {"action/0": ((2, 3), np.float32), "action/1": ((2,), np.int32)}
ABOUT = {"algorithm_name": "DQN", "author": {"me"}, "description": "random"}


def tree(leaves):
    out = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = out
        for part in path:
            at = at.setdefault(part, {})
        at[last] = leaf
    return out


def rows_of(episodes, final):
    rows = oracle.rows_of(episodes, final)
    rows["reward"] = rows["reward"].astype(np.float32)
    return rows | {"steps/seen": np.arange(len(rows["reward"]), dtype=np.int32)}


def filled(rows, lanes=None, **view):
    """Return a buffer of the rows; with lanes each holds all of them."""
    storage = fbuf.storages.Host(keys=("obs/image",))
    view.setdefault("autoreset", "same_step")
    number = len(rows["reward"])
    buffer = fbuf.Buffer(number * (lanes or 1), storage=storage, view=fbuf.views.Transition(**view), lanes=lanes)
    state = buffer.init(tree({name: leaf[0] for name, leaf in rows.items()}))
    given = tree(rows if lanes is None else {n: np.stack([leaf] * lanes, 1) for n, leaf in rows.items()})
    return buffer, buffer.extend(state, given)


def equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), found, expected)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("lanes", [None, 2])
def test_minari_reads_what_was_written(home, lanes):
    episodes = oracle.episodes(0, (5, 1, 7, 2, 6), OBS, ACT)
    rows = rows_of(episodes, final=True)
    buffer, state = filled(rows, lanes, final_observation="final_obs")
    done = fbuf.datasets.to_minari(buffer, state, "toy/mine-v0", **SPACES, metadata=ABOUT)
    assert (done.rows, done.episodes, done.dropped) == (21 * (lanes or 1), 5 * (lanes or 1), 0)
    assert done.path == home / "toy/mine-v0" and [path.name for path in home.iterdir()] == ["toy"]

    read = package.load_dataset("toy/mine-v0")
    assert (read.observation_space, read.action_space) == (OBSERVATION, ACTION)
    about = read.storage.metadata
    assert {name: about[name] for name in ABOUT} == ABOUT and about["dataset_id"] == "toy/mine-v0"
    first = 0
    for number, (found, e) in enumerate(zip(read, episodes * (lanes or 1), strict=True)):
        first = 0 if number == len(episodes) else first
        part = {name: leaf[first : first + e.steps] for name, leaf in rows.items()}
        seen = {"image": e.obs["obs/image"], "pair": (e.obs["obs/pair/0"], e.obs["obs/pair/1"])}
        equal(found.observations, seen)
        equal(found.actions, (part["action/0"], part["action/1"]))
        rest = [part[name] for name in ("reward", "terminated", "truncated", "steps/seen")]
        equal([found.rewards, found.terminations, found.truncations, found.infos["steps"]["seen"]], rest)
        first += e.steps

    if lanes is None:
        again = fbuf.datasets.minari("toy/mine-v0", root=home / "ours", infos=("steps",))
        fbuf.datasets.to_minari(*again, "toy/again-v0", **SPACES)
        for a, b in zip(package.load_dataset("toy/again-v0"), read, strict=True):
            equal((a.observations, a.actions, a.truncations), (b.observations, b.actions, b.truncations))
        rows["infos/steps/seen"] = rows.pop("steps/seen")
        oracle.check_files(home / "ours/minari/toy/mine-v0", rows)


def test_steps_without_a_next_observation_are_left_out(home):
    episodes = oracle.episodes(0, (5, 1, 7, 2, 6), OBS, ACT)  # the first and the fourth terminate
    rows = rows_of(episodes, final=False)
    buffer, state = filled(rows)
    done = fbuf.datasets.to_minari(buffer, state, "toy/mine-v0", **SPACES)
    assert (done.rows, done.episodes, done.dropped) == (5 + 0 + 6 + 2 + 5, 4, 3)
    read = package.load_dataset("toy/mine-v0")
    for found, (number, steps) in zip(read, {0: 5, 2: 6, 3: 2, 4: 5}.items(), strict=True):
        e, ends = episodes[number], np.arange(steps) == steps - 1
        image = e.obs["obs/image"][: steps + 1]
        if e.terminated:  # the last observation stands for the one after
            image = np.concatenate([image[:-1], image[-2:-1]])
        equal(found.observations["image"], image)
        equal((found.terminations, found.truncations), (ends & e.terminated, ends & (not e.terminated)))


def test_reset_rows_are_final_observations(home):
    episodes = oracle.episodes(0, (5, 1, 7), OBS, ACT)
    rows = {}
    for e in episodes:
        for name, leaf in rows_of([e], final=False).items():  # a row more for each episode, with its last observation
            last = e.obs[name][-1:] if name in e.obs else np.zeros_like(leaf[-1:])
            rows[name] = [*rows.get(name, []), leaf, last]
    joined = {name: np.concatenate(parts) for name, parts in rows.items()}
    full, state = filled(joined, autoreset="next_step")
    buffer = fbuf.Buffer(40, view=full.view)  # not full: the oldest row is no reset row
    state = buffer.extend(buffer.init(tree({n: leaf[0] for n, leaf in joined.items()})), tree(joined))
    fbuf.datasets.to_minari(buffer, state, "toy/mine-v0", **SPACES)
    for found, e in zip(package.load_dataset("toy/mine-v0"), episodes, strict=True):
        equal(found.observations["image"], e.obs["obs/image"])
        assert found.terminations[-1] == e.terminated


def test_what_minari_cannot_hold_is_refused(home):
    rows = rows_of(oracle.episodes(0, (3, 2), OBS, ACT), final=True)
    buffer, state = filled(rows, final_observation="final_obs")
    write = fbuf.datasets.to_minari
    with pytest.raises(ValueError, match=r"observation_space is Discrete\(2\), but rows have .*'obs/image': 'uint8"):
        write(buffer, state, "a-v0", observation_space=spaces.Discrete(2), action_space=ACTION)
    narrow = spaces.Tuple((spaces.Box(-9, 9, (2, 3), np.float16), ACTION[1]))
    with pytest.raises(ValueError, match="action_space is Tuple.*but rows have .*'action/0': 'float32"):
        write(buffer, state, "a-v0", observation_space=OBSERVATION, action_space=narrow)
    with pytest.raises(ValueError, match="no row has a known next observation"):
        write(buffer, buffer.clear(state), "a-v0", **SPACES)
    plain = {"observation_space": spaces.Box(0, 9, ()), "action_space": spaces.Discrete(2)}
    row = {"obs": jnp.float32(0), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    for change, error, words in (
        ({"extra": jnp.bfloat16(0)}, TypeError, "leaf 'extra' is bfloat16"),
        ({"reward": jnp.zeros(2)}, ValueError, r"reward is 'reward' of shape \(2,\)"),
    ):
        other = fbuf.Buffer(4, view=fbuf.views.Row())
        one = jax.tree.map(jnp.asarray, row | change)
        with pytest.raises(error, match=words):
            write(other, other.add(other.add(other.init(one), one), one), "a-v0", **plain)
    assert not list(home.iterdir())
    write(buffer, state, "a-v0", **SPACES)
    pytest.raises(FileExistsError, write, buffer, state, "a-v0", **SPACES).match("a-v0 exists, and was not changed")


def test_an_interrupted_write_leaves_nothing(home):
    buffer, state = filled(rows_of(oracle.episodes(0, (3, 2), OBS, ACT), final=True), final_observation="final_obs")

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    pytest.raises(KeyboardInterrupt, fbuf.datasets.to_minari, buffer, state, "a-v0", **SPACES, progress=stop)
    assert not list(home.iterdir())


def test_memory_is_that_of_an_episode(home):
    rows = rows_of(oracle.episodes(0, (16,) * 40, OBS, ACT), final=False)
    made = filled(rows)
    fbuf.datasets.to_minari(*made, "first-v0", **SPACES)  # imports what it needs
    tracemalloc.start()
    fbuf.datasets.to_minari(*made, "a-v0", **SPACES)
    assert tracemalloc.get_traced_memory()[1] < rows["obs/image"].nbytes / 2
    tracemalloc.stop()
