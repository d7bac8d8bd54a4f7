"""Cuts, as programs that restart their environments make them; every method against the model: `contracts/test_model.py`."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Device, Host, Memmap, Ragged
from fbuf.views import Hindsight, Sequence, Transition
from tests.support import datasets_oracle as oracle
from tests.support import refusals
from tests.support.refusals import raises
from tests.support.tables import by_tier

ROW = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
STEPS = Transition(n_step=3, gamma=0.5, autoreset="same_step")
WINDOWS = Sequence(3, episode_end=())


def steps(first, number, **leaves):
    """Rows of a running episode; `obs` counts from `first`."""
    count = np.arange(first, first + number)
    zeros = np.zeros(number, bool)
    rows = {"obs": count.astype(np.float32), "action": count, "reward": np.ones(number, np.float32)}
    return rows | {"terminated": zeros, "truncated": zeros} | leaves


def pairs(buffer, state):
    """What can be drawn: the next observation, return and discount, by the observation."""
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 512).data)
    columns = (data[name].tolist() for name in ("obs", "next_obs", "reward", "discount"))
    return {obs: tuple(rest) for obs, *rest in zip(*columns, strict=True)}


def windows(buffer, state):
    return set(map(tuple, buffer.peek(state, jax.random.key(0), 256).data["t"].tolist()))


def counted(first, number):
    return {"t": jnp.arange(first, first + number)}


WRONG = """
two.cut(two.init({"t": 0}), jnp.array([0])) => TypeError lanes is int32[1]; expected bool[2]
two.cut(two.init({"t": 0}), np.array([True])) => ValueError Buffer.cut: | lanes | [1]; expected | [2]
one.cut(one.init({"t": 0}), np.array([True])) => ValueError lanes has shape [1]; expected
init(Sequence(2, episode_end=(), episode="id"), {"t": 0}) => ValueError no leaf named 'id'; rows have t
init(Sequence(2, episode_end=(), episode="id"), {"id": 0.5}) => TypeError 'id' is float32[]; expected one integer
init(Transition(autoreset="same_step", episode="id"), ROW) => ValueError no leaf named 'id'; rows | or None
"""


@pytest.mark.parametrize("autoreset", by_tier("next_step", more=["same_step"]))
def test_a_cut_ends_an_episode(autoreset):
    buffer = fbuf.Buffer(8, view=fbuf.views.Episode(3, autoreset=autoreset))
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], steps(0, 1))), steps(0, 3))
    assert not buffer.can_sample(state)
    state = buffer.extend(buffer.cut(state), steps(10, 2))
    assert buffer.can_sample(state)
    assert np.unique(buffer.peek(state, jax.random.key(0), 8).data["obs"], axis=0).tolist() == [[0, 1, 2]]


def test_wrong_lanes_and_ids_are_refused():
    one, two = (fbuf.Buffer(8, view=WINDOWS, lanes=lanes) for lanes in (None, 2))
    names = {"one": one, "two": two, "init": lambda view, row: fbuf.Buffer(8, view=view).init(row)}
    refusals.check_all(WRONG, globals() | names)


@pytest.mark.parametrize("autoreset", by_tier("next_step", more=["same_step"]))
def test_no_transition_leads_across_a_restart(autoreset, tmp_path):
    buffer = fbuf.Buffer(20, view=dataclasses.replace(STEPS, autoreset=autoreset))
    fbuf.save(tmp_path, buffer, buffer.extend(buffer.init(ROW), steps(0, 5)))
    buffer, state = fbuf.load(tmp_path, cut=True)
    assert sorted(pairs(buffer, state)) == [0.0, 1.0, 2.0, 3.0]
    seen = pairs(buffer, buffer.extend(state, steps(1000, 4)))
    assert sorted(seen) == [0.0, 1.0, 2.0, 3.0, 1000.0]
    assert seen[2.0] == (4.0, 1.5, 0.25) and seen[3.0] == (4.0, 1.0, 0.5)


def test_replay_cuts_after_the_rows_it_has_collected():
    replay = fbuf.Replay(fbuf.Buffer(40, view=Sequence(2, episode_end=()), lanes=2), {"t": 0})
    for t in range(6):
        replay.add({"t": np.array([t, t])})
        if t == 2:
            replay.cut(np.array([True, False]))
            assert len(replay) == 6
    drawn = replay.sample(256, to="numpy").data["t"]
    assert (np.diff(drawn) == 1).all() and replay.stats()["anchors"] == 4 + 5
    replay.cut(replay.rows().mask[0])
    replay.cut()
    replay.add({"t": np.array([9, 9])})
    assert replay.stats()["anchors"] == 4 + 5


def test_a_cut_after_an_end_keeps_its_final_observation():
    buffer = fbuf.Buffer(20, view=Transition(gamma=0.5, final_observation="final"))
    rows = steps(0, 3, truncated=np.arange(3) == 2, final=np.array([0, 0, 9], np.float32))
    state = buffer.cut(buffer.extend(buffer.init(ROW | {"final": 0.0}), rows))
    assert pairs(buffer, state)[2.0] == (9.0, 1.0, 0.5)


def test_ids_of_masked_rows_cut_nothing():
    buffer = fbuf.Buffer(20, view=Sequence(2, episode_end=(), episode="id"), lanes=2)
    state = buffer.init({"t": 0, "id": 0})
    for t, (mask, ids) in enumerate([((True, True), (5, 5)), ((True, False), (5, 7)), ((True, True), (5, 5))]):
        state = buffer.add(state, {"t": np.array([t, t]), "id": np.array(ids)}, mask=np.array(mask))
    assert windows(buffer, state) == {(0, 1), (1, 2), (0, 2)}


def compressed(path):
    return Compressed(path=path, keys=("t",))


@pytest.mark.more
@pytest.mark.parametrize("storage", by_tier(Memmap, more=[compressed]))
def test_cuts_outlive_two_restarts(tmp_path, storage):
    buffer = fbuf.Buffer(100, view=WINDOWS, storage=storage(str(tmp_path / "rows")))
    state = buffer.extend(buffer.init({"t": 0}), counted(0, 4))
    state = buffer.update_rows(state, buffer.rows(state, last=1).index, {"t": jnp.array([3])})
    expected = {(0, 1, 2), (1, 2, 3)}
    for restart in (10, 20, 30):
        if restart == 20:
            state = buffer.cut(state)
            state = buffer.update_rows(state, buffer.rows(state, last=1).index, {"t": jnp.array([13])})
        del state
        gc.collect()
        state = buffer.extend(buffer.resume({"t": 0}), counted(restart, 4))
        expected |= {(restart, restart + 1, restart + 2), (restart + 1, restart + 2, restart + 3)}
        assert windows(buffer, state) == expected
    del state
    gc.collect()
    state = buffer.resume({"t": 0}, cut=False)
    assert windows(buffer, buffer.extend(state, counted(34, 1))) == expected | {(32, 33, 34)}


def test_buffers_without_episodes_have_none_to_cut(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(9), {"t": 0})
    replay.extend(counted(0, 4))
    before = jax.device_get(replay.state)
    replay.cut()
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(replay.state)))
    buffer, state = oracle.from_arrays({"t": np.arange(6)}, path=tmp_path / "set", episode_end=())
    raises(TypeError, "Buffer.cut", buffer.cut, state)
    stored = fbuf.Replay(buffer, state)
    stored.save(tmp_path / "saved")
    assert len(fbuf.Replay.load(tmp_path / "saved")) == 6


def test_replay_load_cuts_unless_told_otherwise(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(20, view=STEPS), ROW)
    replay.extend(steps(0, 5))
    replay.save(tmp_path)
    drawn = replay.sample(64, to="numpy").data["obs"]
    assert set(drawn) == {0.0, 1.0}
    exact = fbuf.Replay.load(tmp_path, cut=False)
    assert (exact.sample(64, to="numpy").data["obs"] == drawn).all()
    restarted = fbuf.Replay.load(tmp_path)
    assert set(restarted.sample(64, to="numpy").data["obs"]) == {0.0, 1.0, 2.0, 3.0}


@pytest.mark.more
def test_hindsight_takes_no_goal_from_beyond_a_cut():
    def reward(achieved, goal):
        return (achieved == goal).astype(jnp.float32)

    for final in (None, "final"):
        inner = Transition(final_observation=final, autoreset="same_step")
        view = Hindsight(inner, reward, goal="obs/goal", achieved="obs/at", strategy="final", fraction=1.0)
        buffer = fbuf.Buffer(20, view=view)

        def rows(first):
            made = steps(first, 4)
            seen = {"at": made["obs"], "goal": np.full(4, -1.0, np.float32)}
            return made | {"obs": seen, "final": jax.tree.map(lambda x: x * 0 + 77, seen)}

        state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows(0))), rows(0))
        state = buffer.extend(buffer.cut(state), rows(100))
        data = jax.device_get(buffer.peek(state, jax.random.key(0), 256).data)
        for at, goal in zip(data["obs"]["at"], data["obs"]["goal"], strict=True):
            assert goal == (3 if at < 3 else 103), at


@pytest.mark.more
def test_cuts_of_a_checkpoint_are_in_the_files_it_is_loaded_into(tmp_path):
    for name, storage in {"device": Device(), "host": Host(), "memmap": Memmap()}.items():
        buffer = fbuf.Buffer(20, view=WINDOWS, storage=storage)
        state = buffer.cut(buffer.extend(buffer.init({"t": 0}), counted(0, 4)))
        fbuf.save(tmp_path / name, buffer, buffer.extend(state, counted(10, 3)))
        files = fbuf.Buffer(20, view=WINDOWS, storage=Memmap(str(tmp_path / f"{name} rows")))
        _, state = fbuf.load(tmp_path / name, files)
        del state
        gc.collect()
        state = files.resume({"t": 0})
        assert windows(files, state) == {(0, 1, 2), (1, 2, 3), (10, 11, 12)}


@pytest.mark.more
def test_grow_resize_and_convert_keep_cuts(tmp_path):
    expected = {(0, 1, 2), (1, 2, 3), (10, 11, 12), (11, 12, 13)}
    buffer = fbuf.Buffer(8, view=WINDOWS, storage=Ragged())
    state = buffer.cut(buffer.extend(buffer.init({"t": 0, "text": ""}), counted(0, 4) | {"text": ["a"] * 4}))
    larger, grown = buffer.grow(state, capacity=20)
    assert windows(larger, larger.extend(grown, counted(10, 4) | {"text": ["a"] * 4})) == expected
    buffer = fbuf.Buffer(8, view=WINDOWS)
    state = buffer.extend(buffer.cut(buffer.extend(buffer.init({"t": 0}), counted(0, 4))), counted(10, 4))
    fbuf.save(tmp_path, buffer, state)
    larger, state = fbuf.load(tmp_path, resize=20)
    assert windows(larger, state) == expected
    short = fbuf.Buffer(20, view=Sequence(2, boundary="mask", episode_end=()))
    found = {(0, 1), (1, 2), (2, 3), (3, 0), (10, 11), (11, 12), (12, 13)}  # the second of (3, 0) is missing
    assert windows(short, larger.convert(short, state)) == found


@pytest.mark.more
def test_all_buffers_of_a_loaded_mixture_are_cut(tmp_path):
    mixture = fbuf.Mixture({name: fbuf.Buffer(9, view=WINDOWS) for name in ("online", "other")})
    state = {name: buffer.extend(buffer.init({"t": 0}), counted(0, 2)) for name, buffer in mixture.members}
    fbuf.save(tmp_path, mixture, state)
    mixture, state = fbuf.load(tmp_path, cut=True)
    for name, buffer in mixture.members:
        assert not buffer.can_sample(buffer.extend(state[name], counted(2, 1)))


IDS = jnp.array([7, 7, 7, 3, 3, 3, 3, 7, 7])


@pytest.mark.more
def test_ids_of_a_data_set(tmp_path, monkeypatch):
    arrays = {"t": np.arange(9), "id": np.asarray(IDS)}
    view = Sequence(3, episode_end=(), episode="id")
    buffer, state = oracle.from_arrays(arrays, path=tmp_path, episode_end=(), view=view)
    assert windows(buffer, state) == {(0, 1, 2), (3, 4, 5), (4, 5, 6)}


@pytest.mark.more
def test_ids_cannot_change_afterwards():
    buffer = fbuf.Buffer(8, view=Sequence(1, episode_end=(), episode="id"))
    state = buffer.add(buffer.init({"id": 0}), {"id": 4})
    with pytest.raises(ValueError, match="'id' ends episodes"):
        buffer.update_rows(state, buffer.rows(state, last=1).index, {"id": jnp.array([5])})


@pytest.mark.more
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_exports_know_of_cuts(autoreset, tmp_path):
    buffer = fbuf.Buffer(20, view=Transition(n_step=2, autoreset=autoreset))
    state = buffer.extend(buffer.cut(buffer.extend(buffer.init(ROW), steps(0, 3))), steps(100, 2))
    done = fbuf.interop.to_ted(tmp_path / "ted.npz", buffer, state, episode="id")
    with np.load(done.path) as file:
        assert file["observation"].tolist() == [0, 1, 100] and file["next/observation"].tolist() == [1, 2, 101]
        assert file["next/truncated"].ravel().tolist() == [False, True, True] and file["id"].tolist() == [0, 0, 1]
    done = fbuf.interop.to_file(tmp_path / "rows.npz", buffer, state, episode="id")
    with np.load(done.path) as file:
        assert file["id"].tolist() == [0, 0, 0, 1, 1]
