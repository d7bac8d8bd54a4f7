"""Cuts in other views, storages and programs, and episodes by ids: see `tests/buffer/test_cut.py`."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Device, Host, Memmap, Ragged
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.buffer.test_cut import ROW, STEPS, WINDOWS, counted, pairs, steps, windows
from tests.buffer.test_cut import test_a_cut_is_a_truncation_without_final_observation as _truncation
from tests.buffer.test_cut import test_cuts_outlive_two_restarts as _restarts


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


def test_an_episode_is_whole_when_it_is_cut():
    for longer in ("skip", "cut"):
        buffer = fbuf.Buffer(20, view=Episode(4, longer=longer, episode_end=(), episode="id"))
        state = buffer.init({"t": 0, "id": 0})
        for first, number in ((10, 3), (20, 4), (30, 5)):
            state = buffer.extend(state, counted(first, number) | {"id": jnp.zeros(number, jnp.int32)})
            for _ in range(2):
                state = buffer.cut(state)
        expected = {(10, 11, 12, 0), (20, 21, 22, 23)} | ({(30, 31, 32, 33)} if longer == "cut" else set())
        assert windows(buffer, state) == expected
        assert int(buffer.stats(state)["drawable"]) == len(expected)


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


def test_a_lost_cut_is_reported(tmp_path):
    buffer = fbuf.Buffer(20, view=WINDOWS, storage=Memmap(str(tmp_path)))
    state = buffer.extend(buffer.cut(buffer.extend(buffer.init({"t": 0}), counted(0, 4))), counted(10, 4))
    jax.block_until_ready(state)
    del state
    gc.collect()
    (tmp_path / "changes").write_bytes((tmp_path / "changes").read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="0 rows and 1 row updates"):
        buffer.resume({"t": 0})


def test_grow_resize_and_convert_keep_cuts(tmp_path):
    example = {"t": 0, "text": ""}

    def texts(first):
        return {"t": np.arange(first, first + 4), "text": ["a"] * 4}

    expected = {(0, 1, 2), (1, 2, 3), (10, 11, 12), (11, 12, 13)}
    for sampler in (fbuf.samplers.Uniform(), fbuf.samplers.Uniform(over="episodes")):
        view = Sequence(3, episode_end=("end",), autoreset="same_step")
        buffer = fbuf.Buffer(8, view=view, sampler=sampler, storage=Ragged())
        ends = {"end": np.zeros(4, bool)}
        state = buffer.cut(buffer.extend(buffer.init(example | {"end": False}), texts(0) | ends))
        larger, grown = buffer.grow(state, capacity=20)
        assert windows(larger, larger.extend(grown, texts(10) | ends)) == expected
    buffer = fbuf.Buffer(8, view=WINDOWS)
    state = buffer.extend(buffer.cut(buffer.extend(buffer.init({"t": 0}), counted(0, 4))), counted(10, 4))
    fbuf.save(tmp_path, buffer, state)
    larger, state = fbuf.load(tmp_path, resize=20)
    assert windows(larger, state) == expected
    short = fbuf.Buffer(20, view=Sequence(2, boundary="mask", episode_end=()))
    found = {(0, 1), (1, 2), (2, 3), (3, 0), (10, 11), (11, 12), (12, 13)}  # the second of (3, 0) is missing
    assert windows(short, larger.convert(short, state)) == found
    assert windows(short, larger.convert(short, larger.cut(state))) == found | {(13, 0)}


def test_in_one_program_and_for_many_states_at_once():
    buffer = fbuf.Buffer(20, view=WINDOWS, lanes=2)

    def step(state, given):
        t, lanes = given
        return buffer.cut(buffer.add(state, {"t": jnp.stack([t, t])}), lanes), None

    lanes = jnp.zeros((6, 2), bool).at[2, 0].set(True)
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, (jnp.arange(6), lanes)))(buffer.init({"t": 0}))
    assert int(buffer.stats(state)["drawable"]) == 2 + 4
    many = jax.vmap(lambda lanes: jax.lax.scan(step, buffer.init({"t": 0}), (jnp.arange(6), lanes))[0])(
        jnp.stack([lanes, ~lanes])
    )
    assert jax.vmap(buffer.stats)(many)["drawable"].tolist() == [2 + 4, 0]
    assert fbuf.checked(buffer).cut(state) is not None


def test_a_mixture_cuts_one_buffer(tmp_path):
    mixture = fbuf.Mixture({name: fbuf.Buffer(9, view=WINDOWS) for name in ("online", "other")})
    state = mixture.init({"online": {"t": 0}, "other": {"t": 0}})
    for name in mixture.names:
        state = mixture.extend(state, name, counted(0, 2))
    fbuf.save(tmp_path, mixture, state)
    state = mixture.cut(state, "online")
    for name in mixture.names:
        state = mixture.extend(state, name, counted(2, 1))
    assert [bool(mixture[name].can_sample(state[name])) for name in mixture.names] == [False, True]
    mixture, state = fbuf.load(tmp_path, cut=True)
    for name in mixture.names:
        state = mixture.extend(state, name, counted(2, 1))
        assert not mixture[name].can_sample(state[name])


IDS = jnp.array([7, 7, 7, 3, 3, 3, 3, 7, 7])


@pytest.mark.parametrize("piece", [1, 2, 9])
def test_rows_of_one_id_are_an_episode(piece):
    """However many rows one call adds."""
    views = {
        "windows": Sequence(3, episode_end=(), episode="id"),
        "episodes": Episode(4, episode_end=(), episode="id"),
        "steps": Transition(3, 0.5, observation="t", action=None, terminated=None, truncated=None, episode="id"),
    }
    seen = {}
    for name, view in views.items():
        buffer = fbuf.Buffer(20, view=view)
        state = buffer.init({"t": 0, "id": 0, "reward": 0.0})
        for i in range(0, 9, piece):
            rows = {"t": jnp.arange(9), "id": IDS, "reward": jnp.ones(9)}
            state = buffer.extend(state, jax.tree.map(lambda x: x[i : i + piece], rows))  # noqa: B023
        if name == "steps":
            data = buffer.peek(state, jax.random.key(0), 256).data
            seen[name] = set(zip(data["obs"].tolist(), data["next_obs"].tolist(), data["reward"].tolist(), strict=True))
        else:
            seen[name] = windows(buffer, state)
    assert seen["windows"] == {(0, 1, 2), (3, 4, 5), (4, 5, 6)}
    assert seen["episodes"] == {(0, 1, 2, 0), (3, 4, 5, 6)}
    assert seen["steps"] == {(0, 2, 1.5), (1, 2, 1.0), (3, 6, 1.75), (4, 6, 1.5), (5, 6, 1.0)}


def test_ids_of_a_data_set(tmp_path, monkeypatch):
    """Also where an episode begins with a block of rows that are read at once."""
    arrays = {"t": np.arange(9), "id": np.asarray(IDS)}
    view = Sequence(3, episode_end=(), episode="id")
    buffer, state = fbuf.datasets.from_arrays(arrays, path=tmp_path, episode_end=(), view=view)
    assert windows(buffer, state) == {(0, 1, 2), (3, 4, 5), (4, 5, 6)}


def test_ids_cannot_change_afterwards():
    buffer = fbuf.Buffer(8, view=Sequence(1, episode_end=(), episode="id"))
    state = buffer.add(buffer.init({"id": 0}), {"id": 4})
    with pytest.raises(ValueError, match="'id' ends episodes"):
        buffer.update_rows(state, buffer.last(state, 1).index, {"id": jnp.array([5])})


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_exports_know_of_cuts(autoreset, tmp_path):
    """The step before a cut has no next observation, so it is left out, and the one before it is truncated."""
    buffer = fbuf.Buffer(20, view=Transition(n_step=2, autoreset=autoreset))
    state = buffer.extend(buffer.cut(buffer.extend(buffer.init(ROW), steps(0, 3))), steps(100, 2))
    done = fbuf.interop.to_ted(tmp_path / "ted.npz", buffer, state, episode="id")
    with np.load(done.path) as file:
        assert file["observation"].tolist() == [0, 1, 100] and file["next/observation"].tolist() == [1, 2, 101]
        assert file["next/truncated"].ravel().tolist() == [False, True, True] and file["id"].tolist() == [0, 0, 1]
    done = fbuf.interop.to_file(tmp_path / "rows.npz", buffer, state, episode="id")
    with np.load(done.path) as file:
        assert file["id"].tolist() == [0, 0, 0, 1, 1]


def test_a_cut_in_same_step_mode_is_a_truncation():
    _truncation("same_step")


def test_ids_of_masked_rows_do_not_count():
    buffer = fbuf.Buffer(20, view=Sequence(2, episode_end=(), episode="id"))
    state = buffer.init({"t": 0, "id": 0})
    mask = jnp.arange(5) % 2 == 0
    for first in (0, 10):
        state = buffer.extend(state, counted(first, 5) | {"id": jnp.where(mask, 7, first)}, mask=mask)
    assert windows(buffer, state) == {(0, 2), (2, 4), (4, 10), (10, 12), (12, 14)}


def test_cuts_of_compressed_rows_outlive_two_restarts(tmp_path):
    _restarts(tmp_path, lambda path: Compressed(path=path, keys=("t",)))


def test_a_cut_row_does_not_bootstrap_from_its_final_observation():
    view = Transition(n_step=2, gamma=0.5, stack=2, final_observation="final")
    buffer = fbuf.Buffer(20, view=view)
    rows = steps(1, 3, final=np.full(3, 77.0, np.float32))
    state = buffer.extend(buffer.init(ROW | {"final": 0.0}), rows)
    state = buffer.extend(buffer.cut(state), steps(11, 3, final=rows["final"], truncated=np.array([0, 0, 1], bool)))
    state = buffer.cut(state)  # its end is in the data
    batch = buffer.peek(state, jax.random.key(0), 256).data
    found = {(*obs, *then) for obs, then in zip(batch["obs"].tolist(), batch["next_obs"].tolist(), strict=True)}
    assert found == {(0, 1, 2, 3), (1, 2, 2, 3), (0, 11, 12, 13), (11, 12, 13, 77), (12, 13, 13, 77)}


def test_rows_before_a_cut_are_drawn_at_once():
    """They wait for no reset row, whether the data or the cut ends their episode."""
    buffer = fbuf.Buffer(20, view=Transition(3, autoreset="next_step"))
    for end in (False, True):
        rows = steps(0, 3, truncated=np.array([False, False, end]))
        state = buffer.extend(buffer.init(ROW), rows)
        assert not buffer.can_sample(state)
        assert set(pairs(buffer, buffer.cut(state))) == {0.0, 1.0}
