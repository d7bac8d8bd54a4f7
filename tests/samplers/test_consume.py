"""`samplers.Consume`: every row at most so many times, whatever is written meanwhile."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Row, Transition
from tests.support import same_step
from tests.support.epoch import Pool, Trial, buffer_of, check_places
from tests.support.refusals import raises
from tests.support.tables import checks, one_of


def test_a_row_in_place_of_another_is_drawn_once():
    buffer = fbuf.Buffer(4, sampler=Consume())
    state = buffer.extend(buffer.init(np.int32(0)), np.arange(4, dtype=np.int32))
    state, _ = buffer.sample(state, jax.random.key(0), 2)
    state = buffer.extend(state, np.arange(4, 8, dtype=np.int32))  # of two that were drawn, and two that were not
    _, batch = buffer.sample(state, jax.random.key(1), 8)
    assert sorted(np.asarray(batch.data)[np.asarray(batch.mask)].tolist()) == [4, 5, 6, 7]


def test_no_row_is_drawn_too_often():
    Trial(buffer_of(Consume(2), "steps", 3), 1, Pool).run(60, (2, 7, 30))


def test_every_row_is_as_likely_as_every_other():
    check_places(Consume(), 20)


def test_times_must_be_a_number():
    for times in (0, 1.0, True, 2**31):
        raises(ValueError, r"Consume: times is .*; expected an int >= 1", Consume, times)


case = one_of(
    (Consume(3), Transition(n_step=2, autoreset="same_step"), 2),
    exhaustive=[
        (Consume(), Row(), None),
        (Consume(2), Row(), None),
        (Consume(), same_step.Transition(n_step=2, stack=3), 3),
    ],
)


@pytest.mark.more
def test_no_row_of_a_view_is_drawn_too_often(case):
    sampler, view, lanes = case
    buffer = fbuf.Buffer(11 * (lanes or 1), sampler=sampler, view=view, lanes=lanes)
    Trial(buffer, 0, Pool).run(60, (2, 7, 30))


test_every_row_is_as_likely_at_every_place = checks(more=[(check_places, [(Consume(), 3000)])])
