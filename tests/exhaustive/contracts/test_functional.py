import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.more.contracts.test_functional import test_grad_around_sample, test_no_method_calls_back_to_the_host  # noqa: F401
from tests.support import functional
from tests.support.tables import one_of

wrap = one_of(lambda loss: loss)


@pytest.mark.parametrize("name", ["uniform-row", "deduplicated"])
@pytest.mark.parametrize("check", [functional.check_arguments_unchanged, functional.check_laps])
def test_other_buffers_are_functional(check, name):
    check(name)


def test_grad_through_rows_that_were_stored():
    buffer = fbuf.Buffer(capacity=8)

    def total(x):
        state = buffer.extend(buffer.init({"x": x[0]}), {"x": x})
        return jnp.sum(buffer.sample(state, functional.KEY, 16)[1].data["x"])

    slope = jax.jit(jax.grad(total))(jnp.arange(4, dtype=jnp.float32))
    assert float(jnp.sum(slope)) == 16.0 and float(jnp.min(slope)) >= 0.0
    many = jax.vmap(jax.grad(total))(jnp.ones((2, 4), jnp.float32))
    np.testing.assert_array_equal(many, jnp.stack([slope, slope]))


name = one_of("prioritized-transition", "uniform-row")
