"""Further cases of checked, which take long: see `tests/more/buffer/test_checked.py`."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Prioritized
from tests.support.checked import (
    FEW,
    INF,
    KEY,
    buffer_of,
    filled,
    rows_of,
    updated,
    updated_late,
)


@pytest.mark.parametrize("storage", ["Device", "Compressed"])
def test_with_prefetch_only_what_is_nobodys_mistake_passes(storage: str) -> None:
    checked = fbuf.checked(buffer_of(storage, prefetch=1, batch_size=4))
    state = filled(checked)
    error, _ = jax.jit(checkify.checkify(partial(updated_late, checked)))(state, jnp.ones(8, bool))
    assert error.get() is None, error.get()
    state = filled(checked)  # the rows of the other may have expired
    error, _ = jax.jit(checkify.checkify(partial(updated, checked)))(state, jnp.full(4, INF))
    assert "4 priorities are NaN or infinite" in str(error.get())
    with pytest.raises(ValueError, match="there is nothing to draw"):
        checked.sample(checked.clear(state), KEY)


def test_what_is_allowed_is_only_counted() -> None:
    few = dataclasses.replace(buffer_of(), **FEW)
    state = fbuf.checked(few, allow=("retired_rows", "refused_rows")).extend(filled(few, 45), rows_of(50, 30))
    assert int(few.stats(state)["retired_rows"]) > 0
    checked = fbuf.checked(few, allow=("retired_rows",))
    assert fbuf.checked(checked) == fbuf.checked(checked, allow=("retired_rows",)) == checked
    assert fbuf.checked(checked, allow=("empty_samples",)).allow == ("retired_rows", "empty_samples")
    grown, state = checked.grow(state)
    assert isinstance(grown, type(checked)) and grown.allow == checked.allow and grown.buffer != few
    other = dataclasses.replace(grown.buffer, sampler=Prioritized())
    assert int(grown.convert(fbuf.checked(other), state).ring.size[0]) == int(grown.size(state))
