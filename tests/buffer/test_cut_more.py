"""Cuts in other views, storages and programs, and episodes by ids: see `tests/buffer/test_cut.py`."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Device, Host, Memmap, Ragged
from fbuf.views import Hindsight, Sequence, Transition
from tests.buffer.test_cut import ROW, WINDOWS, counted, steps, windows
from tests.buffer.test_cut import test_cuts_outlive_two_restarts as restarts
from tests.support import datasets_oracle as oracle

pytestmark = pytest.mark.more


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


def test_cuts_of_compressed_rows_outlive_two_restarts(tmp_path):
    restarts(tmp_path, lambda path: Compressed(path=path, keys=("t",)))


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


def test_all_buffers_of_a_loaded_mixture_are_cut(tmp_path):
    mixture = fbuf.Mixture({name: fbuf.Buffer(9, view=WINDOWS) for name in ("online", "other")})
    state = {name: buffer.extend(buffer.init({"t": 0}), counted(0, 2)) for name, buffer in mixture.members}
    fbuf.save(tmp_path, mixture, state)
    mixture, state = fbuf.load(tmp_path, cut=True)
    for name, buffer in mixture.members:
        assert not buffer.can_sample(buffer.extend(state[name], counted(2, 1)))


IDS = jnp.array([7, 7, 7, 3, 3, 3, 3, 7, 7])


def test_ids_of_a_data_set(tmp_path, monkeypatch):
    arrays = {"t": np.arange(9), "id": np.asarray(IDS)}
    view = Sequence(3, episode_end=(), episode="id")
    buffer, state = oracle.from_arrays(arrays, path=tmp_path, episode_end=(), view=view)
    assert windows(buffer, state) == {(0, 1, 2), (3, 4, 5), (4, 5, 6)}


def test_ids_cannot_change_afterwards():
    buffer = fbuf.Buffer(8, view=Sequence(1, episode_end=(), episode="id"))
    state = buffer.add(buffer.init({"id": 0}), {"id": 4})
    with pytest.raises(ValueError, match="'id' ends episodes"):
        buffer.update_rows(state, buffer.last(state, 1).index, {"id": jnp.array([5])})


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
