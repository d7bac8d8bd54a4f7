import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Prioritized
from tests.buffer import test_checked as support
from tests.support.refusals import raises
from tests.support.tables import checks

OTHERS = [
    (name, storage)
    for name, case in support.CASES.items()
    for storage in case.storages
    if (name, storage) not in support.FIRST
]


@pytest.mark.parametrize("storage", ["Device", "Compressed"])
def test_prefetch_allows_only_stale_indices(storage):
    checked = fbuf.checked(support.buffer_of(storage, prefetch=1, batch_size=4))
    state = support.filled(checked)
    error, _ = jax.jit(checkify.checkify(partial(support.updated_late, checked)))(state, jnp.ones(8, bool))
    error.throw()
    state = support.filled(checked)  # the rows of the other may have expired
    error, _ = jax.jit(checkify.checkify(partial(support.updated, checked)))(state, jnp.full(4, support.INF))
    assert "4 priorities are NaN or infinite" in str(error.get())
    raises(ValueError, "there is nothing to draw", lambda: checked.sample(checked.clear(state), support.KEY))


def test_allowed_counts_do_not_raise():
    few = dataclasses.replace(support.buffer_of(), **support.FEW)
    state = fbuf.checked(few, allow=("retired_rows", "refused_rows")).extend(
        support.filled(few, 45), support.rows_of(50, 30)
    )
    assert int(few.stats(state)["retired_rows"]) > 0
    checked = fbuf.checked(few, allow=("retired_rows",))
    assert fbuf.checked(checked) == fbuf.checked(checked, allow=("retired_rows",)) == checked
    assert fbuf.checked(checked, allow=("empty_samples",)).allow == ("retired_rows", "empty_samples")
    grown, state = checked.grow(state)
    assert isinstance(grown, type(checked)) and grown.allow == checked.allow and grown.buffer != few
    other = dataclasses.replace(grown.buffer, sampler=Prioritized())
    assert int(grown.convert(fbuf.checked(other), state).ring.size[0]) == int(grown.size(state))


test_checks = checks((support.check_eager, OTHERS), (support.check_jitted, support.FIRST + OTHERS))
