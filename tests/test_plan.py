"""`buffer.plan` against what is then allocated and compiled."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fbuf
from tests.support.plan import EXAMPLE, TRANSITION, check_fixed, deduplicated, distinct_rows, rows


def test_fixed_sizes_are_exact() -> None:
    check_fixed("transition", "prioritized", "host")


def test_not_donated_means_twice() -> None:
    buffer = fbuf.Buffer(50_000)
    plan = buffer.plan(EXAMPLE, donated=False)
    assert plan.peak_extend == pytest.approx(2 * plan.device, rel=0.05)
    assert not plan.donated and "not donated" in str(plan)


def test_nothing_of_the_buffers_size_is_allocated() -> None:
    buffer = fbuf.Buffer(1_000_000_000, view=TRANSITION)
    plan = buffer.plan(EXAMPLE)
    assert plan.device > 780_000_000_000
    assert "GiB" in str(plan)


def test_incompressible_rows_are_planned_raw() -> None:
    buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)), view=TRANSITION)
    noise = rows(2000) | {"obs": np.random.default_rng(0).integers(0, 255, (2000, 28, 28), np.uint8)}
    plan = buffer.plan(EXAMPLE, rows=noise)
    assert plan.host == plan.host_raw


def test_bad_arguments() -> None:
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Compressed(keys=("obs",)))
    with pytest.raises(ValueError, match="both rows and ratio"):
        buffer.plan(EXAMPLE, rows=rows(10), ratio=2.0)
    with pytest.raises(ValueError, match="ratio is 0"):
        buffer.plan(EXAMPLE, ratio=0.0)
    with pytest.raises(ValueError, match="leaf 'obs' has shape"):
        buffer.plan(EXAMPLE, rows=rows(10) | {"obs": np.zeros((10, 3, 3), np.uint8)})


def test_without_rows_nobody_knows_how_far_a_table_fills() -> None:
    plan = deduplicated(4096).plan(EXAMPLE)
    assert plan.table is not None and plan.table.blocks is None and plan.table.places == 4096
    assert "places for blocks" in str(plan) and "give rows" in str(plan)
    few = deduplicated(4096).plan(EXAMPLE, rows=rows(10)).table
    assert few is not None and few.blocks is None and few.known == "10 rows are too few to tell"
    assert fbuf.Buffer(100).plan(EXAMPLE, rows=rows(100)).table is None


def test_lanes_are_rows_too() -> None:
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(7, 8), blocks=4096)
    one = fbuf.Buffer(2000, storage=storage).plan(EXAMPLE, rows=distinct_rows(400)).table
    lanes = jax.tree.map(lambda x: x.reshape(100, 4, *x.shape[1:]), distinct_rows(400))
    assert fbuf.Buffer(2000, storage=storage, lanes=4).plan(EXAMPLE, rows=lanes).table == one
