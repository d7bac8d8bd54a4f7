"""Searches in sorted arrays are those of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._core.control_flow import number_up_to


@pytest.mark.parametrize("number", [*range(1, 10), 64, 1000])
def test_searches_are_those_of_numpy(number):
    rng = np.random.default_rng(number)
    ends = np.sort(rng.integers(0, number, number).astype(np.int32))
    values = rng.integers(-2, number + 2, (7, 50)).astype(np.int32)
    got = jax.jit(number_up_to)(jnp.asarray(ends), jnp.asarray(values))
    np.testing.assert_array_equal(got, np.searchsorted(ends, values, side="right"))
    assert got.dtype == jnp.int32
