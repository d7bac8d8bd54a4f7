"""What goes wrong when buffers, states, stacked states and numbers are mixed up: an error, never silent other data."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.refusals import raises
from tests.support.tables import by_tier
from tests.support.trees import row_with

EXAMPLE = row_with(np.zeros(4, np.float32))
BASE = fbuf.Buffer(10, view=fbuf.views.Transition(autoreset="same_step"))
STRANGERS = [
    dict(capacity=100),
    dict(lanes=2),
    dict(sampler=fbuf.samplers.Prioritized()),
    dict(view=fbuf.views.Row()),
    dict(view=fbuf.views.Transition(n_step=2, autoreset="same_step")),
    dict(view=fbuf.views.Transition(stack=2, autoreset="same_step")),
    dict(view=fbuf.views.Transition(autoreset="next_step")),
]


def rows(count, start=0):
    number = np.arange(start, start + count, dtype=np.float32)
    return row_with(np.repeat(number[:, None], 4, 1), count, action=number.astype(np.int32), reward=number)


@functools.cache
def full():
    return BASE.extend(BASE.init(EXAMPLE), rows(10))


@pytest.mark.parametrize("other", STRANGERS, ids=str)
def test_the_state_of_another_buffer_is_refused(other):
    stranger = dataclasses.replace(BASE, **other)
    with pytest.raises(ValueError, match=r"made by another buffer.*buffer.convert\(other, state\)"):
        stranger.peek(full(), jax.random.key(0), 4)
    with pytest.raises(ValueError, match="made by another buffer"):
        jax.jit(lambda s: stranger.sample(s, jax.random.key(0), 4))(full())


def test_a_view_that_decides_alike_is_welcome():
    other = dataclasses.replace(BASE, view=fbuf.views.Transition(gamma=0.5, autoreset="same_step"))
    assert np.all(other.peek(full(), jax.random.key(0), 4).mask)


def test_states_of_storages_do_not_mix():
    deduplicated = dataclasses.replace(BASE, storage=fbuf.storages.Deduplicated(keys=("obs",)))
    more = dataclasses.replace(BASE, storage=fbuf.storages.Deduplicated(keys=("obs",), blocks=4096))
    host = dataclasses.replace(BASE, storage=fbuf.storages.Host(keys=("obs",)))
    top = fbuf.Buffer(10, writer=fbuf.writers.TopK("reward"))
    for buffer, state, error, said in (
        (deduplicated, full(), TypeError, "Deduplicated: another storage made this state"),
        (BASE, jax.eval_shape(deduplicated.init, EXAMPLE), (TypeError, ValueError), "this state"),
        (host, full(), TypeError, "Host: another storage made this state"),
        (BASE, host.init(EXAMPLE), TypeError, "Device: this state keeps rows on the host"),
        (more, deduplicated.init(EXAMPLE), ValueError, "made by another buffer"),
        (fbuf.Buffer(10), top.init(EXAMPLE), ValueError, "made by another buffer"),
    ):
        raises(error, said, buffer.peek, state, jax.random.key(0), 4)


@pytest.mark.more
@pytest.mark.parametrize("kind", by_tier(fbuf.storages.Compressed, more=[fbuf.storages.Host]))
def test_clear_between_two_writes_keeps_their_order(kind):
    buffer = fbuf.Buffer(64, storage=kind(keys=("obs",), slack=0))

    def both(state, first, second):
        return buffer.extend(buffer.clear(buffer.extend(state, first)), second)

    step = jax.jit(both, donate_argnums=0)
    for _ in range(3):
        state = step(buffer.init(EXAMPLE), rows(60), rows(60, 100))
        state = buffer.extend(state, rows(4, 160))
        held = jax.device_get(buffer.rows(state))
        assert held.mask.all()
        assert held.data["obs"][:, 0].tolist() == list(range(100, 164))


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
    "rows": (lambda s: BUFFER.rows(s, last=2), "jax.vmap(buffer.rows)(state)"),
    "can_add": (BUFFER.can_add, "jax.vmap(lambda state: buffer.can_add(state, n))(state)"),
    "set": (lambda s: BUFFER.set(s, alpha=0.5), "jax.vmap(lambda state: buffer.set(state, **numbers))(state)"),
    "summary": (BUFFER.summary, "one of them, jax.tree.map(lambda x: x[0], state)"),
}


def stacked(init):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init())


@pytest.mark.parametrize("method", METHODS)
def test_a_stacked_state_is_refused_with_the_call_that_works(method):
    call, fix = METHODS[method]
    said = re.escape(f"Buffer.{method}: this state has a leading axis of 3: use {fix}.")
    raises(ValueError, said, lambda: call(stacked(lambda: BUFFER.init({"t": 0}))))


def test_a_mixture_refuses_stacked_states_too():
    mixture = fbuf.Mixture({"online": BUFFER, "offline": fbuf.Buffer(10)})
    state = stacked(lambda: {name: buffer.init({"t": 0}) for name, buffer in mixture.members})
    said = r"Mixture.can_sample: .* axis of 3: use jax.vmap\(mixture.can_sample\)\(states\)"
    raises(ValueError, said, mixture.can_sample, state)
    said = r"jax.vmap\(lambda states, key: mixture.sample\(states, key, batch_size\)\)\(states, key\)"
    raises(ValueError, said, mixture.sample, state, jax.random.key(0), 4)


def test_sizes_and_a_second_axis_are_counted():
    states = stacked(lambda: BUFFER.init({"t": 0}))
    assert jax.vmap(BUFFER.size)(states).tolist() == [0, 0, 0]
    twice = jax.tree.map(lambda leaf: leaf[None], states)
    raises(ValueError, "leading axis of 1", BUFFER.size, twice)
    raises(ValueError, "leading axis of 3", lambda: jax.vmap(BUFFER.size)(twice))
