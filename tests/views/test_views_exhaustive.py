"""Views in more programs, in place, and with every option."""

import numpy as np
import pytest

import fbuf
from fbuf.samplers import Uniform
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.support.inplace import assert_draw_write_draw, assert_order
from tests.support.tables import checks
from tests.support.trees import row_with
from tests.views.test_hindsight import VIEWS, follow, observation, reward
from tests.views.test_transition import CASES, LAYOUTS, check_accumulated
from tests.views.test_windows import ENDS, ROW, check_chances

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("view", VIEWS)
def test_goals_are_of_the_same_episode(view, strategy, lanes):
    for seed in range(1, 3):
        follow(view, strategy, lanes, seed)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_always_and_never(fraction):
    follow("one step", "future", None, 0, fraction=fraction)


@pytest.mark.in_place
@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs/frame",))])
def test_steps_are_in_place(storage):
    view = Hindsight(Transition(n_step=2, stack=2, final_observation="last"), reward)
    buffer = fbuf.Buffer(200_000, lanes=2, view=view, storage=storage)
    number = np.zeros((), int)
    rows = row_with(observation(number, number, 0.0), last=observation(number, number, 0.0))
    assert_draw_write_draw(buffer, rows, buffer.init(rows))


test_checks = checks(
    (check_chances, [(Sequence(1, episode_end=ENDS, autoreset="same_step"), Uniform(over="episodes"))]),
    (check_accumulated, [(layout, *case) for layout in LAYOUTS for case in CASES]),
)


@pytest.mark.in_place
def test_steps_of_episodes_are_in_place():
    view = Episode(12, longer="cut", autoreset="same_step")
    buffer = fbuf.Buffer(400_000, lanes=2, view=view, sampler=Uniform("episodes"), episode_end=ENDS)
    for steps in (0, 4):
        assert_order(buffer, "es", ROW, steps=steps)
