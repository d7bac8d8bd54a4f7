"""More windows: chances, priorities that arrive late, many buffers at once, structure, nothing to draw."""

import jax
import numpy as np

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Sequence
from tests.support.tables import checks
from tests.views.test_windows import EXAMPLE, WINDOWS, check_chances, check_cuts, check_late_priorities, rows_of


def test_episodes_of_one_row():
    rows = rows_of([2, 3, 3]) | {"terminated": np.isin(np.arange(8), (1, 4))}
    for longest in (1, 2):
        buffer = fbuf.Buffer(20, view=Episode(longest, longer="cut", autoreset="next_step"))
        state = buffer.extend(buffer.init(EXAMPLE), rows)
        ids = np.asarray(buffer.peek(state, jax.random.key(0), 100).data["id"])
        assert set(ids[:, 0].tolist()) == {0, 3, 6}


def test_leaves_keep_their_structure():
    rows = rows_of([5, 5]) | {"carry": (np.zeros((10, 2)), {"h": [np.ones(10)]})}
    buffer = fbuf.Buffer(10, view=Sequence(3, autoreset="same_step"))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.peek(state, jax.random.key(0), 4).data
    assert jax.tree.structure(data["carry"]) == jax.tree.structure(rows["carry"])
    assert data["carry"][1]["h"][0].shape == (4, 3)


def test_a_replay_takes_errors_of_windows():
    buffer = fbuf.Buffer(20, view=Sequence(4, autoreset="same_step"), sampler=Prioritized(alpha=1.0, eps=0.0))
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows_of([20]))
    index, errors = replay.sample(8).index, np.arange(1.0, 5.0, dtype=np.float32) * np.ones((8, 1), np.float32)
    replay.update_priority(index, errors, mask=np.arange(4) * np.ones((8, 1)) < 2, eta=0.5)
    assert replay.stats()["max_priority"] == 1.75  # 0.5 * 2 + 0.5 * (1 + 2) / 2


test_checks = checks(
    (check_chances, [(WINDOWS[0], Uniform(over="episodes"))]),
    (check_late_priorities, [(Sequence(5, boundary="mask", at=2, autoreset="same_step"),)]),
    (check_cuts, [(2,)]),
)
