"""Further cases of ragged memory, which take long: see `tests/more/storages/test_ragged_memory.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Staleness
from fbuf.storages import Ragged
from fbuf.views import Row, Transition
from tests.support.ragged import check_growth


@pytest.mark.parametrize(
    ("sampler", "view"), [(Prioritized(), Transition(observation="id", n_step=2)), (Staleness(4, unit=3), Row())]
)
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
