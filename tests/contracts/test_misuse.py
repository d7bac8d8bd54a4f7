"""What goes wrong when buffers, states and numbers are mixed up: refused in words, never silent other data."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import fbuf
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
    number = np.arange(start, start + count)
    return row_with(
        np.repeat(number[:, None], 4, 1).astype(np.float32),
        count,
        action=number.astype(np.int32),
        reward=number.astype(np.float32),
    )


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
    host = dataclasses.replace(BASE, storage=fbuf.storages.Host(keys=("obs",)))
    for buffer, state, error, said in (
        (deduplicated, full(), TypeError, "Deduplicated: another storage made this state"),
        (BASE, jax.eval_shape(deduplicated.init, EXAMPLE), (TypeError, ValueError), "this state"),
        (host, full(), TypeError, "Host: another storage made this state"),
        (BASE, host.init(EXAMPLE), TypeError, "Device: this state keeps rows on the host"),
    ):
        with pytest.raises(error, match=said):
            buffer.peek(state, jax.random.key(0), 4)


@pytest.mark.parametrize("kind", [fbuf.storages.Compressed, fbuf.storages.Host])
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
