"""Views keep the structure of rows: named tuples, dataclasses and any other pytree."""

import collections
from typing import Any

import chex
import jax
import numpy as np
import pytest

import fbuf

pytestmark = pytest.mark.more


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
    found, plain = (batch_of(view, steps(12), on_read=f).reward for f in (doubled, None))
    np.testing.assert_array_equal(found, 2 * plain)
    named = fbuf.transforms.Normalize("row/obs", of="obs")
    ends = fbuf.views.Sequence(4, episode_end=("terminated",), autoreset="same_step")
    assert abs(batch_of(ends, steps(12), on_read=named)["row"].obs).max() < 3
