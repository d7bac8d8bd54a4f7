"""`Replay` over `Consume(order="fifo")`: `add` waits for room, `sample` for a whole batch."""

import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Sequence
from tests.support.refusals import raises
from tests.support.threads import Thread

EXAMPLE = {"t": np.int32(0)}


@pytest.mark.more
def test_an_actor_and_a_learner_wait_for_each_other():
    """Trajectories of each lane come in order, whole, once, and none is missing (IMPALA)."""
    view = Sequence(4, stride=4, episode_end=())
    replay = fbuf.Replay(fbuf.Buffer(24, lanes=2, view=view, sampler=Consume(order="fifo")), EXAMPLE)

    def act():
        try:
            for first in range(0, 10**6, 6):
                replay.extend({"t": np.arange(first, first + 6, dtype=np.int32).reshape(3, 2)})
        except fbuf.ReplayClosed:
            pass

    seen = []
    with replay:
        actor = Thread(act)
        for _ in range(40):
            batch = replay.sample(2, to="numpy")
            assert batch.mask.all()
            seen.append(batch.data["t"])
    actor.ends()
    assert replay.stats()["refused_rows"] == 0
    for lane in (0, 1):
        got = np.concatenate([t for batch in seen for t in batch if t[0] % 2 == lane])
        assert got.tolist() == list(range(lane, lane + 2 * len(got), 2)) and len(got) == 160


def test_waiting_ends_with_a_timeout():
    replay = fbuf.Replay(fbuf.Buffer(4, sampler=Consume(order="fifo")), EXAMPLE)
    assert replay.can_add(4) and not replay.can_add(5)
    lanes = fbuf.Replay(fbuf.Buffer(8, lanes=2, sampler=Consume(order="fifo")), EXAMPLE)
    assert lanes.can_add(8) and not lanes.can_add(9)
    replay.extend({"t": np.arange(3)})
    assert replay.can_add(1) and not replay.can_add(2) and replay.can_sample(3) and not replay.can_sample(4)
    with pytest.raises(TimeoutError, match="waited 0 s for 2 rows; the queue has no room until more rows are drawn"):
        replay.extend({"t": np.arange(3, 5)}, timeout=0)
    full = fbuf.Replay(fbuf.Buffer(1, sampler=Consume(order="fifo")), EXAMPLE)
    full.add({"t": 0})
    raises(TimeoutError, "waited 0 s for 1 row;", full.add, {"t": 1}, timeout=0)
    raises(TimeoutError, "3 rows held, but too few of them can be sampled yet", replay.sample, 4, timeout=0.01)
    replay.add({"t": 3})
    assert replay.sample(3).data["t"].tolist() == [0, 1, 2]
    replay.extend({"t": np.arange(4, 7)})
    assert replay.sample(4).data["t"].tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="Replay.extend: 5 rows at once; expected at most 4, or a larger capacity"):
        replay.extend({"t": np.arange(5)})
    raises(ValueError, "Replay.sample: 5 draws at once; expected at most 4", replay.sample, 5)
