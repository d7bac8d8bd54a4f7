"""`Buffer.summary` of other samplers, writers, storages and custom parts."""

import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._buffer.summary import collect
from fbuf.samplers import Prioritized, Ranked
from tests.support.summary import check, check_all, check_unordered, close, history, plain_quantiles
from tests.support.tables import checks
from tests.support.trees import x64


def test_rows_are_compared_in_blocks(monkeypatch):
    monkeypatch.setattr(collect, "BLOCK_BYTES", 300)  # three rows at a time
    collect.look._jitted.clear_cache()
    told = history("Device", "Prioritized", "Transition")
    check(told, told.buffer.summary(told.state))
    collect.look._jitted.clear_cache()


def test_priorities_of_ranks_and_of_zero():
    for sampler, loose in (
        (Prioritized(alpha=0.5, largest="held", eps=0.0), 1e-4),
        (Prioritized(on="host"), 1e-4),
        (Ranked(), 0.125),
    ):
        buffer, given = fbuf.Buffer(32, sampler=sampler), np.arange(1.0, 21.0, dtype=np.float32)
        state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((20, 2)), priority=given)
        close(buffer.summary(state).priorities, plain_quantiles(given.tolist()), rtol=loose)
    buffer = fbuf.Buffer(8, sampler=Prioritized(alpha=0.0))
    summary = buffer.summary(buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2))))
    assert summary.priorities is None and summary.effective_size == 4
    buffer = fbuf.Buffer(8, sampler=Prioritized(eps=0.0))
    summary = buffer.summary(buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2)), priority=jnp.zeros(4)))
    assert summary.effective_size == 4 and summary.priorities is not None and summary.priorities.max == 0


def test_a_reset_row_is_not_a_step_of_an_episode():
    view = fbuf.views.Transition(autoreset="next_step", truncated=None)
    buffer = fbuf.Buffer(16, view=view)
    example = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
    ends = np.array([0, 0, 1, 0, 0, 1, 0, 0, 0], bool)  # 3 steps, the reset row; 2 steps, the reset row; 2 steps
    rows = {"obs": np.zeros(9, np.float32), "action": np.zeros(9, np.int32), "reward": np.zeros(9, np.float32)}
    summary = buffer.summary(buffer.extend(buffer.init(example), {**rows, "terminated": ends}))
    assert summary.episodes is not None and summary.episodes.lengths is not None
    assert (summary.episodes.number, summary.episodes.cut) == (2, 1)
    assert (summary.episodes.lengths.min, summary.episodes.lengths.max) == (2, 3)


def test_rows_of_eight_bytes_are_hashed_whole():
    with x64():
        rows = jnp.asarray([[1], [1 + 2**32], [1], [2**40]], jnp.int64)
        assert collect.distinct(np.asarray(collect.hashed(rows))) == 3


def test_ragged_leaves_have_bytes_but_no_raw_size():
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    state = buffer.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0})
    rows = [{"obs": np.zeros(n % 4 + 1, np.float32), "text": "x" * n, "reward": 1.0} for n in range(20)]
    state = buffer.extend(state, rows)
    summary = buffer.summary(state)
    assert summary.nbytes == buffer.nbytes(state) and summary.distinct is None
    text = summary.leaves["text"]
    assert text.raw is None and text.ratio is None and text.stored is not None
    assert text.stored.host >= sum(range(20)) and summary.leaves["reward"].distinct == 1


test_checks = checks((check_all, [("Compressed", "Consume", "Row")]), (check_unordered, [("Device", "TopK")]))
