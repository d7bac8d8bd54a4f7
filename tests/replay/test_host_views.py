"""Batches of every view that `Replay` draws in NumPy are those of the jitted program."""

import numpy as np
import pytest

from fbuf.views import Transition
from tests.support.host_views import SAMPLERS, VIEWS, compare, row_of


@pytest.mark.parametrize(("view", "lanes"), [("stack, n, repeat", 2), ("mask, learns", None)])
def test_batches_are_those_of_the_program(view, lanes):
    assert compare(VIEWS[view], lanes) > 50


@pytest.mark.parametrize(("view", "lanes", "sampler"), [("stack", 2, "seen"), ("n", None, "buffer")])
def test_prioritized_batches_and_states_are_those_of_the_programs(view, lanes, sampler):
    assert compare(VIEWS[view], lanes, sampler=SAMPLERS[sampler]) > 50


def test_sums_that_xla_rounds_to_zero_are_its_own():
    def row(random, lead):
        made = row_of(random, lead)
        return made | {"reward": (made["reward"] * 10.0 ** random.integers(-45, -30)).astype(np.float32)}

    view = Transition(n_step=3, autoreset="same_step")
    assert compare(view, None, row_of=row, steps=20) == 0
