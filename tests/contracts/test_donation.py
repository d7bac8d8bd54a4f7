"""`assert_inplace` tests a jitted function as it is: without donation it fails, and says what to write."""

import functools

import jax
import jax.numpy as jnp
import pytest

import fbuf
from fbuf.testing import assert_inplace
from tests.support.refusals import raises

BUFFER = fbuf.uniform(100_000)
STATE = jax.eval_shape(lambda: BUFFER.init(jnp.zeros(8)))
ROWS = jax.ShapeDtypeStruct((32, 8), jnp.float32)


class Agent:
    @functools.partial(jax.jit, static_argnums=0)
    def act(self, state, rows):
        return BUFFER.extend(state, rows)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def learn(self, state, key):
        return BUFFER.sample(state, key, 32)[0]


@pytest.mark.optimized
def test_a_function_jitted_without_donation_fails():
    raises(AssertionError, r"jitted without donation, so", lambda: assert_inplace(jax.jit(BUFFER.extend), STATE, ROWS))
    draw = jax.jit(lambda state, key: BUFFER.sample(state, key, 32))
    raises(AssertionError, r"without donation.*jax.jit\(step", lambda: assert_inplace(draw, STATE, jax.random.key(0)))
    small = fbuf.uniform(4)
    raises(AssertionError, "without donation", lambda: assert_inplace(jax.jit(small.add), small.init(0.0), 1.0))
    with pytest.raises(AssertionError, match=r"without donation.*donate_argnums=1\)"):
        assert_inplace(functools.partial(jax.jit(fbuf.Buffer.extend, static_argnums=0), BUFFER), STATE, ROWS)
    raises(AssertionError, r"without donation.*donate_argnums=1\)", lambda: assert_inplace(Agent().act, STATE, ROWS))


@pytest.mark.optimized
def test_a_function_jitted_with_donation_passes():
    assert_inplace(jax.jit(BUFFER.extend, donate_argnums=0), STATE, ROWS)
    assert_inplace(jax.jit(BUFFER.extend, donate_argnames="state"), STATE, ROWS)
    assert_inplace(BUFFER.extend, STATE, ROWS)

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def step(buffer, state, key, size):
        return buffer.sample(state, key, size)[0]

    assert_inplace(step, BUFFER, STATE, jax.random.key(0), 32, donate=1)
    assert_inplace(functools.partial(step, BUFFER, size=32), STATE, jax.random.key(0))
    assert_inplace(Agent().learn, STATE, jax.random.key(0))


@pytest.mark.optimized
def test_a_donated_argument_does_not_raise_the_limit():
    reverse = jax.jit(lambda step, rows: (step + 1, rows[::-1]), donate_argnums=(0, 1))
    raises(AssertionError, "temporary bytes", lambda: assert_inplace(reverse, jnp.zeros(4), jnp.zeros((100_000, 8))))
