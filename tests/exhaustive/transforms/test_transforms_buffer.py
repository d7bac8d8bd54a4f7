"""Further cases of transforms buffer, which take long: see `tests/more/transforms/test_transforms_buffer.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Device
from tests.support.transforms import BATCH, EXAMPLE, VIEWS, given_rows, make
from tests.support.trees import same


def test_eager_jitted_scanned_and_donated() -> None:
    buffer = make(Device(), VIEWS["Sequence"], prefetch=1, batch_size=BATCH, sampler=Prioritized())
    rows: list[Any] = [given_rows(np.random.default_rng(i), 5) for i in range(5)]
    keys = jax.random.split(jax.random.key(0), 5)

    def one(state: Any, given: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, given[0]), given[1])
        return state, (batch.data, batch.mask)

    def several(run: Any) -> Any:
        state, out = buffer.init(EXAMPLE), []
        for pair in zip(rows, keys, strict=True):
            state, batch = run(state, pair)
            out.append(batch)
        return jax.tree.map(lambda *x: np.stack(x), *out)

    jitted = several(jax.jit(one, donate_argnums=0))
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    scan = jax.jit(lambda s, x: lax.scan(one, s, x), donate_argnums=0)
    same(jax.device_get(scan(buffer.init(EXAMPLE), (stacked, keys))[1]), jitted)
    same(several(one), jitted)


@pytest.mark.parametrize("storage", [Device(), Compressed(keys=("obs",))])
def test_a_loaded_buffer_continues_with_the_same_batches(storage: Any, tmp_path: Path) -> None:
    buffer = make(storage, VIEWS["Transition"], prefetch=1, batch_size=BATCH)

    @jax.jit
    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key)
        return state, (batch.data, batch.index, batch.weight)

    def steps(state: Any, first: int) -> Any:
        out = []
        for i in range(first, first + 4):
            state, batch = step(state, given_rows(np.random.default_rng(i), 5), jax.random.key(i))
            out.append((batch[0], batch[1].slot, batch[2]))
        return state, out

    state, _ = steps(buffer.init(EXAMPLE), 0)
    fbuf.save(tmp_path, buffer, state)
    loaded, again = fbuf.load(tmp_path)
    assert loaded == buffer
    same(again.transforms, state.transforms)
    same(steps(again, 4)[1], steps(state, 4)[1])
