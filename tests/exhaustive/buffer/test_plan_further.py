"""Further cases of plan, which take long: see `tests/more/buffer/test_plan.py`."""

from __future__ import annotations

import jax
import pytest

from tests.buffer.test_plan import EXAMPLE, deduplicated, distinct_rows


def test_the_table_of_blocks_is_foretold() -> None:
    buffer = deduplicated(4096)
    given = distinct_rows(2000)
    table = buffer.plan(EXAMPLE, rows=jax.tree.map(lambda x: x[:500], given)).table
    assert table is not None and table.blocks is not None
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 2000, 100):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 100], given))
    stats = buffer.stats(state)
    assert table.blocks == pytest.approx(int(stats["blocks"]), rel=0.05)
    assert table.load == pytest.approx(float(stats["blocks_load"]), rel=0.05)
    assert (table.places, table.rows, table.gives_way) == (4096, 2000, "")
    assert table.known == "sample of 500 rows"
