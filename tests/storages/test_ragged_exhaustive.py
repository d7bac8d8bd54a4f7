"""`storages.Ragged`: any history of lanes and sizes, growth with every sampler and view, and unlimited replays."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Ragged
from fbuf.views import Episode, Row, Sequence, Transition
from tests.storages.test_ragged_more import (  # noqa: F401
    test_a_donated_step_copies_nothing,
)
from tests.support import combinations
from tests.support.ragged import check_growth
from tests.support.tables import checks, one_of

pytestmark = pytest.mark.exhaustive

view = one_of(Row())


SAMPLERS = [sampler for name, sampler in combinations.SAMPLERS.items() if name != "Prioritized(on='host')"]
VIEWS = [Row(), Transition(observation="id", n_step=2, autoreset="same_step"), Episode(4, autoreset="same_step")]
VIEWS += [Sequence(3, boundary=boundary, autoreset="same_step") for boundary in ("stop", "mask")]


test_a_grown_buffer_is_one_that_was_larger_from_the_start = checks(
    (check_growth, zip(SAMPLERS, itertools.cycle(VIEWS)))
)


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


def test_windows_hold_ragged_rows() -> None:
    storage = Ragged(keys=("obs",))
    example = {"obs": np.zeros(0, np.int32), "text": "", "terminated": False, "truncated": False}

    def row(e: int, t: int) -> Any:
        return example | {"obs": np.arange(t, dtype=np.int32), "text": f"{e}.{t}", "terminated": t % 4 == 3}

    rows = [[row(e, t) for e in range(2)] for t in range(8)]
    for view, lead in ((Sequence(3, autoreset="same_step"), (5, 3)), (Episode(4, autoreset="same_step"), (5, 4))):
        buffer = fbuf.Buffer(capacity=24, lanes=2, storage=storage, view=view)
        state = buffer.extend(buffer.init(example), rows)
        state, batch = buffer.sample(state, jax.random.key(0), 5)
        assert batch.lazy.shape == lead
        there = np.asarray(batch.data["mask"])
        assert (batch.lazy.present == there).all()
        columns = batch.lazy["text"], batch.lazy["obs"], there, batch.data["is_first"]
        for text, obs, mask, first in zip(*columns, strict=True):
            steps = [int(t.split(".")[1]) for t in text if t is not None]
            assert steps == list(range(steps[0], steps[0] + mask.sum()))
            assert [len(o) for o in obs if o is not None] == steps
            assert all(steps[i] % 4 == 0 for i in np.flatnonzero(first[mask]))
        assert "text" not in batch.data and "_ticket" not in batch.data
