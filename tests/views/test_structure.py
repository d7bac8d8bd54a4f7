"""The structure of batches, as shapes; `tests/more/views/test_structure.py` looks at values."""

import collections

import jax
import numpy as np
import pytest

import fbuf
from tests.support.refusals import raises

Step = collections.namedtuple("Step", "obs done")
ROW = Step(np.zeros(2, np.float32), np.bool_(False))


def batch_of(view, row):
    buffer = fbuf.Buffer(20, view=view)
    return jax.eval_shape(lambda: buffer.peek(buffer.init(row), jax.random.key(0), 5).data)


def test_rows_keep_their_structure_where_the_view_adds_nothing():
    assert jax.tree.structure(batch_of(fbuf.views.Row(), ROW)) == jax.tree.structure(ROW)
    for row in (ROW, ROW._asdict(), np.zeros(2, np.float32)):
        windows = batch_of(fbuf.views.Sequence(4, episode_end=()), row)
        assert jax.tree.structure(windows) == jax.tree.structure(row)
        assert jax.tree.leaves(windows)[0].shape[:2] == (5, 4)


def test_a_view_that_adds_fields_puts_rows_that_are_not_dicts_under_row():
    view = fbuf.views.Sequence(4, episode_end=("done",), autoreset="same_step")
    windows = batch_of(view, ROW)
    assert set(windows) == {"row", "mask", "is_first", "learning_mask"} and windows["row"].obs.shape == (5, 4, 2)
    assert set(batch_of(view, ROW._asdict())) == {"obs", "done", "mask", "is_first", "learning_mask"}
    for adds in ({"burn_in": 1}, {"bootstrap": 1}, {"boundary": "mask"}, {"autoreset": "next_step"}):
        assert set(batch_of(fbuf.views.Sequence(4, episode_end=(), **adds), ROW)) == set(windows), adds


@pytest.mark.parametrize("name", ["mask", "is_first", "learning_mask"])
def test_a_name_that_the_view_adds_is_refused_with_a_fix(name):
    buffer = fbuf.Buffer(20, view=fbuf.views.Sequence(4, episode_end=("done",), autoreset="same_step"))
    row = {name: np.float32(0), "done": np.bool_(False)}
    raises(ValueError, rf"leaf '{name}', but the view adds mask.*Rename it, or nest the rows", buffer.init, row)
    view = fbuf.views.Sequence(4, episode_end=("step/done",), autoreset="same_step")
    assert fbuf.Buffer(20, view=view).init({"step": row}).rows["step"].keys() == row.keys()
