"""A state stacked by `vmap`: each method refuses it outside `vmap`, and names the call that works."""

import re

import jax
import jax.numpy as jnp
import pytest

import fbuf
from tests.support.refusals import raises

BUFFER = fbuf.prioritized(20)
KEY = jax.random.key(0)
METHODS = {
    "stats": (BUFFER.stats, "jax.vmap(buffer.stats)(state)"),
    "extend": (lambda s: BUFFER.extend(s, {"t": jnp.arange(3)}), "jax.vmap(buffer.extend)(state, rows)"),
    "get": (lambda s: BUFFER.get(s, jnp.arange(3)), "jax.vmap(buffer.get)(state, index)"),
    "sample": (
        lambda s: BUFFER.sample(s, KEY, 4),
        "jax.vmap(lambda state, key: buffer.sample(state, key, batch_size))(state, key)",
    ),
    "last": (lambda s: BUFFER.last(s, 2), "jax.vmap(lambda state: buffer.last(state, n))(state)"),
    "set": (lambda s: BUFFER.set(s, alpha=0.5), "jax.vmap(lambda state: buffer.set(state, **numbers))(state)"),
    "summary": (BUFFER.summary, "one of them, jax.tree.map(lambda x: x[0], state)"),
    "check_state": (BUFFER.check_state, "one of them, jax.tree.map(lambda x: x[0], state)"),
}


def stacked(init):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init())


@pytest.mark.parametrize("method", METHODS)
def test_a_stacked_state_is_refused_with_the_call_that_works(method):
    call, fix = METHODS[method]
    said = re.escape(f"Buffer.{method}: this state has a leading axis of 3: use {fix}.")
    raises(ValueError, said, lambda: call(stacked(lambda: BUFFER.init({"t": 0}))))


def test_a_mixture_refuses_stacked_states_too():
    mixture = fbuf.Mixture({"online": BUFFER, "offline": fbuf.uniform(10)})
    state = stacked(lambda: mixture.init({"online": {"t": 0}, "offline": {"t": 0}}))
    raises(ValueError, r"Mixture.size: .* axis of 3: use jax.vmap\(mixture.size\)\(state\)", mixture.size, state)
    raises(ValueError, r"jax.vmap\(lambda state, row: mixture.add\(state", mixture.add, state, "online", {"t": 1})


def test_sizes_and_a_second_axis_are_counted():
    states = stacked(lambda: BUFFER.init({"t": 0}))
    assert jax.vmap(BUFFER.size)(states).tolist() == [0, 0, 0]
    twice = jax.tree.map(lambda leaf: leaf[None], states)
    raises(ValueError, "leading axis of 1", BUFFER.size, twice)
    raises(ValueError, "leading axis of 3", lambda: jax.vmap(BUFFER.size)(twice))
