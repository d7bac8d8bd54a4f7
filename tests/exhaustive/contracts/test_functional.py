import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fbuf
from tests.more.contracts.test_functional import test_grad_around_sample, test_no_method_calls_back_to_the_host  # noqa: F401
from tests.support import functional
from tests.support.tables import one_of
from tests.support.trees import close

wrap = one_of(lambda loss: loss)


@pytest.mark.parametrize("name", ["uniform-row", "deduplicated"])
@pytest.mark.parametrize("check", [functional.check_arguments_unchanged, functional.check_laps])
def test_other_buffers_are_functional(check, name):
    check(name)


@pytest.mark.optimized
def test_an_exported_step_with_blocks_gives_the_same():
    buffer, state, raw = (
        functional.BUFFERS["deduplicated"],
        functional.filled("deduplicated"),
        jax.random.key_data(functional.KEY),
    )
    run = jax.jit(functools.partial(functional.step, buffer))
    again = export.deserialize(export.export(run)(state, raw, functional.rows(2)).serialize())
    close(again.call(state, raw, functional.rows(2)), run(state, raw, functional.rows(2)), rtol=1e-6)


def test_grad_through_rows_that_were_stored():
    """Device rows are plain arrays: what is read depends on what was written."""
    buffer = fbuf.Buffer(capacity=8)

    def total(x):
        state = buffer.extend(buffer.init({"x": x[0]}), {"x": x})
        return jnp.sum(buffer.sample(state, functional.KEY, 16)[1].data["x"])

    slope = jax.jit(jax.grad(total))(jnp.arange(4, dtype=jnp.float32))
    assert float(jnp.sum(slope)) == 16.0 and float(jnp.min(slope)) >= 0.0
    many = jax.vmap(jax.grad(total))(jnp.ones((2, 4), jnp.float32))
    np.testing.assert_array_equal(many, jnp.stack([slope, slope]))


name = one_of("prioritized-transition", "uniform-row")
