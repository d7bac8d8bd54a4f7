"""Advice for what newcomers write first: each line named in an error works."""

import copy
import dataclasses
import pickle

import jax
import numpy as np
import pytest

import fbuf
from tests.support.refusals import raises
from tests.support.tables import by_tier


def filled(**parts):
    replay = fbuf.Replay(fbuf.Buffer(20, **parts), {"obs": np.float32(0), "lazy": 0})
    replay.extend({"obs": np.ones(9, np.float32), "lazy": np.zeros(9, np.int32)})
    return replay


@pytest.mark.parametrize("form", ["jax", "numpy"])
def test_leaves_of_a_batch_are_in_its_data(form):
    replay = filled()
    for batch, kind in ((replay.sample(4, to=form), "Sample"), (replay.rows(), "Rows")):
        raises(AttributeError, f"{kind} has no attribute 'obs'. Write batch.data..obs...", getattr, batch, "obs")
        raises(AttributeError, f"{kind} has no attribute 'reward'.$", getattr, batch, "reward")
        raises(AttributeError, "'indices'. Did you mean 'index'", getattr, batch, "indices")
        raises(AttributeError, "lazy: all rows are arrays, in `data`", getattr, batch, "lazy")
        raises(TypeError, rf"{kind}\['obs'\] is not defined.* Write batch.data\['obs'\].", lambda b=batch: b["obs"])
        raises(TypeError, "not iterable", iter, batch)
        same = pickle.loads(pickle.dumps(jax.device_get(batch)))
        for other in (copy.deepcopy(batch), copy.copy(batch), same, jax.tree.map(lambda x: x, batch)):
            np.testing.assert_array_equal(other.data["obs"], batch.data["obs"])
        assert not hasattr(batch, "__array__") and not hasattr(batch, "__jax_array__")


def test_rows_are_in_the_state():
    buffer = fbuf.Buffer(5)
    raises(TypeError, r"len\(buffer\): .*Write buffer.size\(state\), or buffer.capacity.", len, buffer)
    assert buffer and bool(buffer) is True and int(buffer.size(buffer.init(0.0))) == 0


def test_parts_are_in_their_modules():
    for name, home in {
        "Prioritized": "samplers",
        "Transition": "views",
        "Compressed": "storages",
        "TopK": "writers",
    }.items():
        raises(AttributeError, f"no attribute '{name}'. Write fbuf.{home}.{name}", getattr, fbuf, name)
        assert hasattr(getattr(fbuf, home), name)
    raises(AttributeError, "module 'fbuf' has no attribute 'Priority'$", getattr, fbuf, "Priority")
    assert not hasattr(fbuf, "__wrapped__")


def test_options_of_a_replay_that_belong_elsewhere():
    for name in ("to", "device", "batch_size", "capacity", "lanes"):
        with pytest.raises(TypeError, match=f"Replay: there is no option '{name}'. .*Write|Put"):
            fbuf.Replay(fbuf.Buffer(5), 0.0, **{name: 4})
    raises(TypeError, "no option 'sed'. Did you mean 'seed'", fbuf.Replay, fbuf.Buffer(5), 0.0, sed=3)
    assert fbuf.Replay(fbuf.Buffer(5), example=0.0, seed=3).buffer.capacity == 5


def test_errors_of_lazy_leaves_are_not_replaced():
    class Broken:
        def open(self, data):
            raise AttributeError("the store has no such thing")

    replay = fbuf.Replay(fbuf.Buffer(4), {"t": 0})
    replay.add({"t": 0})
    batch = replay.sample(2)
    raises(AttributeError, "all rows are arrays", getattr, batch, "lazy")
    raises(AttributeError, "no such thing", getattr, dataclasses.replace(batch, ragged=Broken()), "lazy")


@pytest.mark.more
def test_fewer_rows_than_a_view_needs():
    row = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    for view, ahead in (
        (fbuf.views.Transition(n_step=3, autoreset="same_step"), 3),
        (fbuf.views.Sequence(4, autoreset="same_step"), 3),
    ):
        replay = fbuf.Replay(fbuf.Buffer(9, view=view), row)
        raises(ValueError, "no row can be sampled. Add rows", replay.sample, 4)
        for held in range(1, ahead + 1):
            replay.add(row)
            said = rf"none of the {held} rows? held can be sampled yet; .* needs up to {ahead} more of its episode"
            raises(ValueError, said, replay.sample, 4)
            assert not replay.can_sample()
        replay.add(row)
        assert replay.can_sample() and replay.sample(4).mask.all()


@pytest.mark.more
def test_episodes_that_are_too_short_and_rows_that_were_drawn():
    row = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": True, "truncated": False}
    replay = fbuf.Replay(fbuf.Buffer(90, view=fbuf.views.Sequence(4, autoreset="same_step")), row)
    for held in range(1, 9):
        replay.add(row)
        said = rf"none of the {held} rows? held can be sampled yet; .* needs up to 3 more of its episode"
        raises(ValueError, said, replay.sample, 4)
    for _ in range(4):
        replay.add({**row, "terminated": False})
    assert replay.sample(4).mask.all()
    view = fbuf.views.Transition(n_step=3, autoreset="same_step")
    replay = fbuf.Replay(fbuf.Buffer(9, view=view, sampler=fbuf.samplers.Consume()), row)
    replay.add(row)
    assert replay.sample(1).mask.all()
    raises(ValueError, "no row can be sampled. Add rows", replay.sample, 1)


@pytest.mark.parametrize("to", ["jax", "numpy"])
@pytest.mark.parametrize(
    "sampler", by_tier(fbuf.samplers.Epoch(), more=[fbuf.samplers.Prioritized(replace=False), fbuf.samplers.Consume()])
)
def test_a_batch_larger_than_the_rows_that_are_drawn_once_warns_once(sampler, to):
    replay = fbuf.Replay(fbuf.Buffer(100, sampler=sampler), {"t": 0})
    for number in range(12):
        replay.add({"t": number})
    assert replay.sample(2, to=to).mask.all()
    with pytest.warns(RuntimeWarning, match="batch_size is 16, but only 12 rows can be .*has each at most once.*fewer"):
        batch = replay.sample(16, to=to)
    assert 0 < np.asarray(batch.mask).sum() <= 12
    replay.extend({"t": np.arange(4)})
    assert np.asarray(replay.sample(16, to=to).mask).any()  # an error if it warned again
