"""Batches of every view that `Replay` draws in NumPy are those of the jitted program."""

import numpy as np
import pytest

import fbuf
from fbuf._host_draws.deferred import Deferred
from fbuf.views import Transition
from tests.support.host_views import SAMPLERS, VIEWS, compare, row_of
from tests.support.tables import by_tier
from tests.support.trees import same


@pytest.mark.parametrize(("view", "lanes"), by_tier(("stack, n, repeat", 2), more=[("mask, learns", None)]))
def test_batches_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes) == 1


def test_a_row_may_close_two_anchors_of_one_lane_and_none_of_another():
    buffer = fbuf.Buffer(36, lanes=3, view=Transition(stack=2, terminated=None, truncated="end", autoreset="same_step"))
    example = {"obs": 0, "action": 0, "reward": 0.0, "end": False}
    replays = made, other = [fbuf.Replay(buffer, example) for _ in range(2)]
    other._engine.host, other._engine.deferred = None, Deferred()
    ends = {1: [True, True, True], 2: [False, True, False], 3: [False, True, True]}
    for step in range(15):
        row = {"obs": np.full(3, step, np.int32), "action": np.arange(3, dtype=np.int32)}
        row |= {"reward": np.zeros(3, np.float32), "end": np.array(ends.get(step, [False] * 3))}
        for replay in replays:
            replay.add(row)
        if step == 11:
            assert made.state is not None  # every row is written; the next ones overwrite the oldest
        if step > 10:
            same(*(replay.sample(64, to="numpy") for replay in replays))


@pytest.mark.parametrize(("view", "lanes", "sampler"), by_tier(("stack", 2, "seen"), more=[("n", None, "buffer")]))
def test_prioritized_batches_and_states_are_those_of_the_programs(view, lanes, sampler):
    assert compare(VIEWS[view], lanes, sampler=SAMPLERS[sampler]) == 1


@pytest.mark.more
def test_sums_that_xla_rounds_to_zero_are_its_own():
    def row(random, lead):
        made = row_of(random, lead)
        return made | {"reward": (made["reward"] * 10.0 ** random.integers(-45, -30)).astype(np.float32)}

    view = Transition(n_step=3, autoreset="same_step")
    assert compare(view, None, row_of=row, steps=20) == 0


CASES = [
    ("n, final", 1),
    ("stack, n, final", None),
    ("stop, bootstrap", 2),
    ("cross, learns", 1),
    ("mask, resets", 3),
    ("episode, cut", None),
]


@pytest.mark.more
@pytest.mark.optimized
@pytest.mark.parametrize(("view", "lanes"), CASES, ids=str)
def test_batches_are_those_of_the_optimised_program(view, lanes):
    assert compare(VIEWS[view], lanes, seed=1) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [None, 1, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_batches_of_every_view_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes, seed=2) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_prioritized_batches_of_every_view_are_those_of_the_programs(view, lanes, sampler):
    assert compare(VIEWS[view], lanes, seed=3, sampler=SAMPLERS[sampler]) == 1
