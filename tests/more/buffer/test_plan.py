"""More plans: sizes of every storage, of compressed rows, of tables of blocks."""

import jax
import numpy as np
import pytest

import fbuf
from tests.buffer.test_plan import EXAMPLE, TRANSITION, deduplicated, rows


def test_compressed_reports_the_source_of_its_estimate():
    buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)), view=TRANSITION)
    raw = buffer.plan(EXAMPLE)
    assert raw.host_from == "raw upper bound" and raw.host == raw.host_raw
    given = buffer.plan(EXAMPLE, ratio=100.0)
    assert given.host_from == "ratio given" and given.host == raw.host_raw // 100
    sampled = buffer.plan(EXAMPLE, rows=rows(3000))
    assert sampled.host_from == "sample of 3000 rows"
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 20_000, 1000):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 1000], rows(20_000)))
    host = buffer.nbytes(state)["host"]
    assert host < sampled.host_raw / 5
    assert sampled.host == pytest.approx(host, rel=0.25)


def test_without_rows_the_load_of_a_table_is_unknown():
    plan = deduplicated(4096).plan(EXAMPLE)
    assert plan.table is not None and plan.table.blocks is None and plan.table.places == 4096
    assert "places for blocks" in str(plan) and "give rows" in str(plan)
    few = deduplicated(4096).plan(EXAMPLE, rows=rows(10)).table
    assert few is not None and few.blocks is None and few.known == "10 rows are too few to tell"
    assert fbuf.Buffer(100).plan(EXAMPLE, rows=rows(100)).table is None


def test_incompressible_rows_are_planned_raw():
    buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)), view=TRANSITION)
    noise = rows(2000) | {"obs": np.random.default_rng(0).integers(0, 255, (2000, 28, 28), np.uint8)}
    plan = buffer.plan(EXAMPLE, rows=noise)
    assert plan.host == plan.host_raw
