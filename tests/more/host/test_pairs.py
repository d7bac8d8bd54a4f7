"""Observation pairs in any order, against a list of all rows."""

import pickle

import numpy as np
import pytest

from fbuf._host.codecs import Zstd
from fbuf._host.pairs import ObservationPairs

LENGTH = 40


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("codec", [None, Zstd()])
def test_steps_in_any_order(paired, lanes, codec):
    rng = np.random.default_rng(lanes)
    pairs = ObservationPairs(LENGTH, lanes, (6, 5), np.uint8, codec, paired)
    model = np.zeros((2, LENGTH, lanes, 6, 5), np.uint8)
    latest, at = np.zeros((lanes, 6, 5), np.uint8), 0
    for turn in range(32):
        number = int(rng.integers(1, 90))
        rows = rng.integers(0, 3, (number, 2, lanes, 6, 5)).astype(np.uint8)
        follows = rng.random((number, lanes)) < 0.8  # the observation is the next observation of the step before
        for i in range(number):
            rows[i, 0][follows[i]] = (rows[i - 1, 1] if i else latest)[follows[i]]
        jumps = turn % 3 == 2
        position = rng.integers(0, LENGTH, number) if jumps else (at + np.arange(number)) % LENGTH
        if turn % 4:
            pairs.extend(rows[:, 0], rows[:, 1] if paired else None, position)
        else:
            for i, place in enumerate(position.tolist()):
                pairs.add(rows[i, 0], rows[i, 1], place)
        for i, place in enumerate(position.tolist()):
            model[:, place] = rows[i]
        at, latest = int(position[-1]) + 1, rows[-1, 1]
        assert pairs.position == at % LENGTH
        if turn % 10 == 9:
            pairs = pickle.loads(pickle.dumps(pairs))
        place, lane = rng.integers(0, LENGTH, 50), rng.integers(0, lanes, 50)
        read = pairs.read(place, lane, (0, 1)[: 1 + paired])
        for offset, array in enumerate(read):
            np.testing.assert_array_equal(array, model[offset, place, lane])
    assert pairs._store.length < 4 * LENGTH + 300  # rows that were replaced are dropped


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
