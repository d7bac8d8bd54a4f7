import jax
import pytest

import fbuf
from tests.buffer.test_plan import EXAMPLE, SAMPLERS, STORAGES, VIEWS, check_fixed, deduplicated, distinct_rows
from tests.support.tables import checks, pairwise


@pytest.mark.parametrize("on_full", ["retire", "refuse"])
def test_plan_predicts_a_table_that_is_too_small(on_full):
    buffer = deduplicated(1024, on_full)
    given = distinct_rows(2000)
    plan = buffer.plan(EXAMPLE, rows=jax.tree.map(lambda x: x[:500], given))
    table = plan.table
    assert table is not None and table.load is not None and table.load > 1.5
    assert table.gives_way == {"retire": "retired", "refuse": "refused"}[on_full]
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 2000, 20):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 20], given))
    stats = buffer.stats(state)
    assert int(stats["refused_rows" if on_full == "refuse" else "retired_rows"]) > 900
    held = 2000 - int(stats["refused_rows"]) - int(stats["retired_rows"])
    assert table.rows == pytest.approx(held, rel=0.15)
    assert f"{'oldest' if on_full == 'retire' else 'others'} are {table.gives_way}: {table.wanted:,} places" in str(
        plan
    )
    larger = deduplicated(table.wanted, on_full).plan(EXAMPLE, rows=given).table
    assert larger is not None and larger.gives_way == "" and larger.rows == 2000


def test_plan_counts_rows_of_all_lanes():
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(7, 8), blocks=4096)
    one = fbuf.Buffer(2000, storage=storage).plan(EXAMPLE, rows=distinct_rows(400)).table
    lanes = jax.tree.map(lambda x: x.reshape(100, 4, *x.shape[1:]), distinct_rows(400))
    assert fbuf.Buffer(2000, storage=storage, lanes=4).plan(EXAMPLE, rows=lanes).table == one


test_optimized_checks = pytest.mark.optimized(checks((check_fixed, pairwise(VIEWS, SAMPLERS, STORAGES))))
