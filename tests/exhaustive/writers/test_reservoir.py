"""`writers.Reservoir` over long streams, and in place."""

import numpy as np
import pytest

from fbuf.views import Sequence, Transition
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.writers.test_reservoir import buffer_of, check_inplace, held_sets


def test_every_row_of_a_long_stream_is_equally_likely():
    held = held_sets(rows=300, calls=7, capacity=20, runs=30_000)
    counts = held.sum(axis=0)
    # Inclusions of different rows are negatively correlated: their variance is (1 - C / T) of independent ones.
    spread = (counts - 2000) ** 2 / 2000 / (1 - 20 / 300)
    assert abs(spread.sum() * 299 / 300 - 299) / np.sqrt(2 * 299) < 4


@pytest.mark.parametrize("view", [Transition(autoreset="same_step"), Sequence(4, autoreset="same_step")], ids=str)
def test_views_of_neighbouring_rows_are_refused(view):
    raises(ValueError, r"reads neighbouring rows, but Reservoir\(\) may replace any", buffer_of, view=view)


test_optimized_checks = pytest.mark.optimized(checks((check_inplace, [(100,)])))
