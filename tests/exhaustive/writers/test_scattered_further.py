"""Further cases of scattered, which take long: see `tests/more/writers/test_scattered.py`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fbuf.samplers import Prioritized
from tests.support.scattered import (
    EXAMPLE,
    make,
    rows_of,
)


@pytest.mark.parametrize(
    ("storage", "writer", "x64"),
    [
        ("Compressed", "Largest", True),
        ("Device", "TopK", False),
        ("Device", "TopK", True),
        ("Device", "Reservoir", True),
    ],
)
def test_strict_promotion_and_x64(storage: str, writer: str, x64: bool) -> None:
    wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with jax.numpy_dtype_promotion("strict"), wide(x64), jax.debug_nans(True):
        buffer = make(storage, writer, sampler=Prioritized())
        state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 30))
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"]})
        assert np.asarray(batch.mask).all() and np.asarray(buffer.rows(state).mask).all()
        assert len(set(np.asarray(buffer.rows(buffer.clear(state)).mask).tolist())) == 1
