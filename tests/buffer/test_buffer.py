"""Checked buffers, plans, summaries and prefetched batches in further combinations."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._buffer.summary import collect
from fbuf.samplers import Prioritized, Ranked
from tests.buffer.test_checked import check_jitted
from tests.buffer.test_plan import EXAMPLE as FRAME
from tests.buffer.test_plan import TRANSITION, deduplicated, rows
from tests.support.prefetch import CHECKS, EXAMPLE, check_batches, make, rows_at
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.summary import check, check_all, check_unordered, close, history, plain_quantiles
from tests.support.tables import checks
from tests.support.trees import same, x64

pytestmark = pytest.mark.more


def test_a_jitted_step_raises():
    check_jitted("stale indices", "Compressed")


def test_compressed_reports_the_source_of_its_estimate():
    buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)), view=TRANSITION)
    raw = buffer.plan(FRAME)
    assert raw.host_from == "raw upper bound" and raw.host == raw.host_raw
    given = buffer.plan(FRAME, ratio=100.0)
    assert given.host_from == "ratio given" and given.host == raw.host_raw // 100
    sampled = buffer.plan(FRAME, rows=rows(3000))
    assert sampled.host_from == "sample of 3000 rows"
    state = buffer.init(FRAME)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 20_000, 1000):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 1000], rows(20_000)))
    host = buffer.nbytes(state)["host"]
    assert host < sampled.host_raw / 5
    assert sampled.host == pytest.approx(host, rel=0.25)
    noise = rows(2000) | {"obs": np.random.default_rng(0).integers(0, 255, (2000, 28, 28), np.uint8)}
    plan = buffer.plan(FRAME, rows=noise)  # cannot be compressed
    assert plan.host == plan.host_raw


def test_without_rows_the_load_of_a_table_is_unknown():
    plan = deduplicated(4096).plan(FRAME)
    assert plan.table is not None and plan.table.blocks is None and plan.table.places == 4096
    assert "places for blocks" in str(plan) and "give rows" in str(plan)
    few = deduplicated(4096).plan(FRAME, rows=rows(10)).table
    assert few is not None and few.blocks is None and few.known == "10 rows are too few to tell"
    assert fbuf.Buffer(100).plan(FRAME, rows=rows(100)).table is None


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_its_own_rows():
    script = """
import os, sys, warnings
import numpy as np
from fbuf._host.store.store import Column, Store
warnings.simplefilter("ignore")
s = Store((Column("a", (), np.dtype(np.int32), None),), lanes=1, length=8, slack=0)
tickets = s.write([np.arange(8, dtype=np.int32)[:, None]], None)[:, 0]
numbers = [s.request([(0, tickets)])]
pid = os.fork()
for _ in range(3):
    numbers.append(s.request([(0, tickets)]))
for number in numbers:
    out = np.zeros(8, np.int32)
    assert s.collect(number, [(0, tickets, out)]).all() and (out == np.arange(8)).all()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
"""
    run_python(script)


@pytest.mark.parametrize("pending", [False, True])
def test_the_interpreter_exits_during_reads(pending):
    script = f"""
import fbuf, jax, numpy as np
buffer = fbuf.Buffer(64, storage=fbuf.storages.Compressed(keys=("x",)), prefetch=1, batch_size=2000)
state = buffer.init({{"x": np.zeros((64, 64), np.uint8)}})
state = buffer.extend(state, {{"x": np.ones((64, 64, 64), np.uint8)}})
for i in range(3):
    state, batch = buffer.sample(state, jax.random.key(i))
if not {pending}:
    jax.block_until_ready(batch)
    del state, batch
print("done")
"""
    done = run_python(script)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_convert_to_and_from_prefetch():
    buffer = make("compressed", "uniform")
    other = dataclasses.replace(buffer, sampler=Prioritized(), batch_size=3)
    state = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows_at(0)), jax.random.key(0))[0]
    converted = buffer.convert(other, state)
    now = other.peek(converted, jax.random.fold_in(jax.random.key(1), 1))
    converted, batch = other.sample(converted, jax.random.key(1))
    same(batch, now)
    plain = dataclasses.replace(other, prefetch=0)
    assert other.convert(plain, converted).ahead is None
    with pytest.raises(ValueError, match=r"prefetch, batch_size.*buffer\.convert\(other, state\)"):
        plain.sample(converted, jax.random.key(0))
    raises(ValueError, "made by another buffer", lambda: buffer.sample(converted, jax.random.key(0)))
    with pytest.raises(ValueError, match="made by another buffer"):
        dataclasses.replace(other, batch_size=4).sample(converted, jax.random.key(0))


test_checks = checks(
    (check_all, [("Compressed", "Consume", "Row")]),
    (check_unordered, [("Device", "TopK")]),
    (check_batches, [("host", "consume", "sequence", "eager"), ("compressed", "uniform", "hindsight", "scan")]),
    *((check, ["compressed"]) for check in CHECKS[4:]),
)
