"""Observation pairs in any order, against a list of all rows."""

import numpy as np
import pytest

from fbuf._host.codecs import Zstd
from fbuf._host.pairs import ObservationPairs

pytestmark = pytest.mark.more

LENGTH = 40


def test_damage_and_other_arguments_are_noticed():
    pairs = ObservationPairs(LENGTH, 2, (6, 5), np.uint8, Zstd())
    rows = np.arange(30 * 2 * 30, dtype=np.uint8).reshape(30, 2, 6, 5)
    pairs.extend(rows[:-1], rows[1:], np.arange(29))
    arrays = pairs.to_arrays()
    for name, value in (("row", 10_000), ("row", -2), ("written", 1_000), ("where", -1)):
        with pytest.raises(ValueError, match=r"Store\.from_arrays"):
            pairs.restore(arrays | {name: np.full_like(arrays[name], value)})
    with pytest.raises(ValueError, match=r"Store\.from_arrays"):
        ObservationPairs(LENGTH, 1, (6, 5), np.uint8, Zstd()).restore(arrays)
    np.testing.assert_array_equal(pairs.read(np.arange(29), np.zeros(29, int))[1], rows[1:, 0])
