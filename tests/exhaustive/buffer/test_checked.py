"""Further cases of checked: see `tests/buffer/test_checked.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from tests.support.checked import CASES, FIRST, KEY, STORAGES, buffer_of, check_eager, check_jitted, filled

OTHERS = [(name, storage) for name, case in CASES.items() for storage in case.storages if (name, storage) not in FIRST]


@pytest.mark.parametrize(("name", "storage"), OTHERS)
def test_an_eager_call_raises_at_once_with_other_storages(name: str, storage: str) -> None:
    check_eager(name, storage)


@pytest.mark.parametrize(("name", "storage"), FIRST + OTHERS)
def test_every_jitted_step_raises_through_checkify(name: str, storage: str) -> None:
    check_jitted(name, storage)


SAMPLERS: dict[str, Any] = {
    "Uniform": Uniform(),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Ranked": Ranked(),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Staleness": Staleness(4),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_over_every_storage_is_checked(storage: str, sampler: str) -> None:
    """In a scan: nothing is wrong at first and the batches are those of the buffer; then there is nothing to draw."""
    buffer = buffer_of(storage, sampler=SAMPLERS[sampler])
    checked = fbuf.checked(buffer)

    def run(buffer: Any, state: Any, keys: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state, batch = buffer.sample(state, key, 4)
            if buffer.sampler.prioritized:
                state = buffer.update_priority(state, batch.index, batch.data["reward"])
            return state, (batch.data, batch.index.slot, batch.mask)

        return lax.scan(step, state, keys)

    keys = jax.random.split(KEY, 3)
    jitted = jax.jit(checkify.checkify(partial(run, checked)))
    error, (state, batches) = jitted(filled(checked), keys)
    assert error.get() is None, error.get()
    other, expected = jax.jit(partial(run, buffer))(filled(buffer), keys)
    for a, b in zip(jax.tree.leaves(batches), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(state.counters, other.counters)
    error, _ = jitted(checked.clear(state), keys)
    assert "Buffer.sample: there is nothing to draw" in str(error.get())
