"""`storages.Ragged`: any history of lanes and sizes, growth with every sampler and view, and unlimited replays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Ragged, Zstd
from fbuf.views import Episode, Row, Sequence, Transition
from tests.support.ragged import check_growth, check_history


@given(
    seed=st.integers(0, 2**32 - 1),
    lanes=st.sampled_from([None, 1, 3]),
    codec=st.sampled_from([None, Zstd(3)]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=6),
    columns=st.booleans(),
)
def test_rows_are_those_of_a_plain_list(seed: int, lanes: int | None, codec: Any, sizes: Any, columns: bool) -> None:
    check_history(seed, lanes, codec, sizes, columns, masked=False)


SAMPLERS = [
    Uniform(),
    Uniform(over="episodes"),
    Prioritized(),
    Prioritized(largest="held", uniform=0.2, normalize="buffer"),
    Epoch(),
    Consume(2),
    Staleness(4, unit=3),
    Ranked(uniform=0.2),
]
VIEWS = [Row(), Transition(observation="id", n_step=2), Sequence(3), Sequence(3, boundary="mask"), Episode(4)]


@pytest.mark.parametrize(("sampler", "view"), list(itertools.product(SAMPLERS, VIEWS)))
def test_a_grown_buffer_is_one_that_was_larger_from_the_start(sampler: Any, view: Any) -> None:
    check_growth(sampler, view)


def test_unlimited_replay() -> None:
    replay = fbuf.Replay(
        fbuf.Buffer(capacity=4, storage=Ragged(), sampler=Prioritized()), {"text": "", "x": 0.0}, unlimited=True
    )
    index = None
    for i in range(0, 21, 3):
        replay.extend([{"text": str(i + j), "x": float(i + j)} for j in range(3)], mask=np.array([True, i != 9, True]))
        index = index or replay.last(1).index
        replay.sample(2)
    replay.extend([{"text": f"+{j}", "x": 0.0} for j in range(70)])
    want = [str(i) for i in range(21) if i != 10] + [f"+{j}" for j in range(70)]
    assert len(replay) == 90 and replay.buffer.capacity == 128
    assert [t for t in replay.rows().lazy["text"] if t is not None] == want
    assert replay.get(index).lazy["text"] == ["2"]
    replay.update_priority(index, np.array([50.0], np.float32))
    replay.grow(capacity=200)
    assert replay.sample(64).lazy["text"].count("2") > 2
    replay.clear()
    replay.add({"text": "new", "x": 1})
    assert replay.rows().lazy["text"][0] == "new"
