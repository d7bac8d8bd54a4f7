"""More of writers that replace any row: storages, futures of a state, in place, strict modes, conversions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf.samplers import Prioritized
from fbuf.testing import assert_inplace
from tests.support.refusals import raises
from tests.support.scattered import EXAMPLE, STORAGES, Anywhere, check_largest, check_refused, make, rows_of
from tests.support.tables import checks, one_of

pytestmark = pytest.mark.more


@given(data=st.data())
def test_the_largest_stay_and_come_out_in_order(data):
    check_largest("Compressed, small", data, lanes=None)


storage = one_of("Compressed, small")


def test_an_old_state_reads_its_own_rows_or_says_that_they_expired(storage):
    kind = dataclasses.replace(STORAGES[storage], slack=10, on_expired="mask")
    buffer = make(kind, "Anywhere")
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 12))
    old, expected = state, jax.device_get(buffer.rows(state).data)
    for i in range(8):
        state = buffer.extend(state, rows_of(100 * i + 100, 4))
        got = jax.device_get(buffer.rows(old))
        for name in EXAMPLE:
            shown = got.mask.reshape(-1, *(1,) * (expected[name].ndim - 1))
            assert np.array_equal(got.data[name], np.where(shown, expected[name], 0))
        assert got.mask.all() if i < 2 else not got.mask.all() or i < 4
        assert np.asarray(buffer.rows(state).mask).all()
    strict = make(dataclasses.replace(kind, on_expired="raise"), "Anywhere")
    raises(Exception, "expired", lambda: jax.block_until_ready(strict.rows(old)))


@pytest.mark.in_place
def test_update_and_write_in_one_step_copy_nothing():
    buffer = fbuf.Buffer(80_000, sampler=Prioritized(), writer=Anywhere())
    example = {"obs": jax.ShapeDtypeStruct((16,), np.uint8)}

    def step(state, rows, key):
        state, batch = buffer.sample(state, key, 8)
        state = buffer.extend(state, rows)
        state = buffer.update_priority(state, batch.index, jnp.ones(8))
        state = buffer.update_rows(state, batch.index, {"obs": batch.data["obs"]})
        return buffer.extend(state, rows), batch

    rows = {"obs": jax.ShapeDtypeStruct((3, 16), np.uint8)}
    assert_inplace(step, jax.eval_shape(buffer.init, example), rows, jax.random.key(0))


test_checks = checks((check_refused, [("Compressed",)]))
