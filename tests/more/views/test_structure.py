"""The structure of rows in batches: what was added comes back as it was, where the view adds nothing."""

import collections
from typing import Any

import chex
import jax
import numpy as np

import fbuf

KEY = jax.random.key(0)
Info = collections.namedtuple("Info", "step mask")
Step = collections.namedtuple("Step", "obs action reward terminated info")


@chex.dataclass(frozen=True)
class ChexStep:
    obs: Any
    done: Any


def steps(n):
    number = np.arange(n, dtype=np.int32)
    obs, zeros = np.stack([number, -number], 1).astype(np.float32), np.zeros(n, bool)
    return Step(obs, number % 3, number.astype(np.float32), zeros, Info(number, zeros))


def batch_of(view, rows, **options):
    buffer = fbuf.Buffer(20, view=view, **options)
    state = buffer.init(jax.tree.map(lambda leaf: leaf[0], rows))
    return jax.tree.map(np.asarray, buffer.peek(buffer.extend(state, rows), KEY, 5).data)


def test_a_view_that_adds_nothing_returns_the_rows_own_structure():
    rows = steps(12)
    assert jax.tree.structure(batch_of(fbuf.views.Row(), rows)) == jax.tree.structure(rows)
    windows = batch_of(fbuf.views.Sequence(4, episode_end=()), rows)
    assert isinstance(windows, Step) and isinstance(windows.info, Info) and windows.obs.shape == (5, 4, 2)
    np.testing.assert_array_equal(windows.info.step, windows.info.step[:, :1] + np.arange(4))
    plain = {"obs": rows.obs, "mask": np.ones(12, np.int32)}  # no clash: the view adds no `mask`
    assert batch_of(fbuf.views.Sequence(4, episode_end=()), plain)["mask"].tolist() == [[1] * 4] * 5


def test_a_chex_dataclass_and_one_array_come_back_from_windows():
    rows = ChexStep(obs=np.arange(12, dtype=np.float32), done=np.zeros(12, bool))
    windows = batch_of(fbuf.views.Sequence(4, episode_end=()), rows)
    assert isinstance(windows, ChexStep) and windows.obs.shape == (5, 4)
    array = batch_of(fbuf.views.Sequence(4, episode_end=()), np.arange(12, dtype=np.int32))
    np.testing.assert_array_equal(array, array[:, :1] + np.arange(4))
    with_ends = batch_of(fbuf.views.Sequence(4, episode_end=("done",), autoreset="same_step"), rows)
    assert isinstance(with_ends["row"], ChexStep)


def test_a_view_that_adds_fields_keeps_other_structures_under_row():
    rows = steps(12)
    for boundary in ("stop", "mask"):
        view = fbuf.views.Sequence(4, episode_end=("terminated",), boundary=boundary, autoreset="same_step")
        windows = batch_of(view, rows)
        assert set(windows) == {"row", "mask", "is_first", "learning_mask"} and isinstance(windows["row"], Step)
        assert windows["row"].obs.shape == (5, 4, 2) and windows["mask"].shape == (5, 4)
    array = batch_of(fbuf.views.Sequence(4, episode_end=(), burn_in=1), np.arange(12, dtype=np.int32))
    assert array["row"].shape == (5, 4) and array["learning_mask"].tolist() == [[False, True, True, True]] * 5
    flat = batch_of(view, rows._asdict())
    assert set(flat) == {*Step._fields, "mask", "is_first", "learning_mask"} and isinstance(flat["info"], Info)


def test_transitions_keep_the_structure_of_the_leaves_they_pass_on():
    view = fbuf.views.Transition(truncated=None, autoreset="same_step")
    data = batch_of(view, steps(12))
    assert set(data) == {"obs", "action", "reward", "discount", "next_obs", "terminated", "info"}
    assert isinstance(data["info"], Info) and data["info"].step.shape == (5,)
    inner = {"now": steps(12)._asdict(), "terminated": np.zeros(12, bool)}
    names = {name: f"now/{name}" for name in ("reward", "action")}
    view = fbuf.views.Transition(observation="now/obs", truncated=None, autoreset="same_step", **names)
    data = batch_of(view, inner)
    assert set(data["now"]) == {"terminated", "info"} and data["now"]["info"]["step"].shape == (5,)


def test_any_pytree_is_an_observation():
    rows = steps(12)._asdict() | {"obs": {0: np.zeros(12), 1: ChexStep(obs=np.zeros((12, 2)), done=np.zeros(12))}}
    rows |= {"info": jax.tree_util.Partial(max, np.zeros(12))}  # of a class whose leaves have no names
    data = batch_of(fbuf.views.Transition(truncated=None, autoreset="same_step"), rows)
    assert data["next_obs"][1].obs.shape == (5, 2) and data["info"].args[0].shape == (5,)


def test_transforms_see_the_rows_of_a_view_that_adds_nothing():
    rows = {"x": np.arange(12, dtype=np.float32), "mask": np.zeros(12, bool)}
    center = fbuf.transforms.Normalize("x")
    view = fbuf.views.Sequence(4, episode_end=())
    data = batch_of(view, rows, on_read=center)
    assert not data["mask"].any() and data["x"].all()  # the row's own `mask` hides nothing
    doubled = fbuf.transforms.Map(lambda window: window._replace(reward=2 * window.reward))
    np.testing.assert_array_equal(
        *(batch_of(view, steps(12), on_read=f).reward * k for f, k in ((doubled, 1), (None, 2)))
    )
    named = fbuf.transforms.Normalize("row/obs", of="obs")
    ends = fbuf.views.Sequence(4, episode_end=("terminated",), autoreset="same_step")
    assert abs(batch_of(ends, steps(12), on_read=named)["row"].obs).max() < 3
