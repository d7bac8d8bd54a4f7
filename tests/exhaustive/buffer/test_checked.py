import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from tests.buffer import test_checked as support
from tests.support.refusals import raises
from tests.support.tables import checks

OTHERS = [
    (name, storage)
    for name, case in support.CASES.items()
    for storage in case.storages
    if (name, storage) not in support.FIRST
]
SAMPLERS = {
    "Uniform": Uniform(),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Ranked": Ranked(),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Staleness": Staleness(4),
}


@pytest.mark.parametrize("storage", support.STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_over_every_storage_is_checked(storage, sampler):
    buffer = support.buffer_of(storage, sampler=SAMPLERS[sampler])
    checked = fbuf.checked(buffer)

    def run(buffer, state, keys):
        def step(state, key):
            state, batch = buffer.sample(state, key, 4)
            if buffer.sampler.prioritized:
                state = buffer.update_priority(state, batch.index, batch.data["reward"])
            return state, (batch.data, batch.index.slot, batch.mask)

        return lax.scan(step, state, keys)

    keys = jax.random.split(support.KEY, 3)
    jitted = jax.jit(checkify.checkify(partial(run, checked)))
    error, (state, batches) = jitted(support.filled(checked), keys)
    assert error.get() is None, error.get()
    other, expected = jax.jit(partial(run, buffer))(support.filled(buffer), keys)
    for a, b in zip(jax.tree.leaves(batches), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(state.counters, other.counters)
    error, _ = jitted(checked.clear(state), keys)
    assert "Buffer.sample: there is nothing to draw" in str(error.get())


@pytest.mark.parametrize("storage", ["Device", "Compressed"])
def test_prefetch_allows_only_stale_indices(storage):
    checked = fbuf.checked(support.buffer_of(storage, prefetch=1, batch_size=4))
    state = support.filled(checked)
    error, _ = jax.jit(checkify.checkify(partial(support.updated_late, checked)))(state, jnp.ones(8, bool))
    assert error.get() is None, error.get()
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
