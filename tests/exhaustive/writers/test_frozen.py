"""Frozen buffers with every sampler and view."""

# ruff: noqa: F401, F811

import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import DataSet
from fbuf.testing import assert_inplace
from fbuf.views import Transition
from tests.more.writers.test_frozen import test_eager_jitted_scanned_and_donated
from tests.support import pieces
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS
from tests.support.refusals import raises
from tests.support.trees import same
from tests.writers.test_frozen import BATCH, STACKS, check_batches, device, made, opened, small_blocks, stepping

CASES = [(s, v) for s in SAMPLERS for v in VIEWS if (s, v) not in REFUSED]


@pytest.fixture(params=[Uniform()])
def sampler(request):
    return request.param


@pytest.mark.parametrize(("sampler", "view"), CASES)
def test_the_batches_of_device(made, sampler, view):
    check_batches(*made, sampler, view)


def test_numbers_and_priorities(made):
    path, rows = made
    settings = {"view": Transition(stack=2, autoreset="same_step"), "sampler": Prioritized(largest="held", uniform=0.2)}
    one, two = fbuf.datasets.open(path, **settings), device(rows, **settings)
    for i in range(3):
        drawn = []
        for buffer, state in (one, two):
            state = buffer.rebuild(buffer.set(state, alpha=0.3 + i))
            state, batch = buffer.sample(state, jax.random.key(i), BATCH, beta=0.5)
            state = buffer.update_priority(state, batch.index, jnp.arange(BATCH) - 3.0)
            drawn.append((buffer, state, batch))
        same(drawn[0][2], drawn[1][2])
        one, two = drawn[0][:2], drawn[1][:2]
    same(one[0].stats(one[1]), two[0].stats(two[1]))


def test_a_replay_of_what_was_opened_leaves_its_state_usable(opened):
    buffer, state = opened
    index = buffer.peek(state, jax.random.key(0), 2).index
    state = buffer.update_priority(state, index, jnp.full(2, jnp.nan))  # counted, and no business of the replay
    replay = fbuf.Replay(buffer, state)
    replay.update_priority(replay.sample(2).index, np.full(2, 9.0))
    assert int(buffer.stats(state)["refused_nonfinite"]) == 2
    same(buffer.peek(state, jax.random.key(0), 2).index, index)
    with pytest.raises(ValueError, match="made by another buffer"):
        fbuf.Replay(dataclasses.replace(buffer, sampler=Uniform()), state)
    live = fbuf.Buffer(4)
    raises(TypeError, "example is a BufferState; expected one row", lambda: fbuf.Replay(live, live.init({"t": 0})))
    with pytest.raises(ValueError, match=r"other.storage is DataSet.*datasets.open\('/elsewhere'\)"):
        buffer.convert(dataclasses.replace(buffer, storage=DataSet("/elsewhere")), state)


@pytest.mark.parametrize("traced", [False, True])
def test_another_view_of_the_same_rows(made, traced):
    buffer, state = fbuf.datasets.open(made[0])
    other = dataclasses.replace(buffer, view=fbuf.views.Sequence(3, autoreset="same_step"), sampler=Epoch())
    want = fbuf.datasets.open(made[0], view=other.view, sampler=other.sampler)[1]
    got = (jax.jit(buffer.convert, static_argnums=0) if traced else buffer.convert)(other, state)
    same(dataclasses.replace(got, rows=None), dataclasses.replace(want, rows=None))
    back = other.convert(buffer, got)
    same(dataclasses.replace(back, rows=None), dataclasses.replace(state, rows=None))


def test_replay_and_checked(made, opened):
    (_, rows), (buffer, state) = made, opened
    checked = fbuf.checked(buffer)
    state, batch = checked.sample(state, jax.random.key(0), BATCH)
    state = checked.update_priority(state, batch.index, jnp.ones(BATCH))
    raises(ValueError, "NaN or infinite", lambda: checked.update_priority(state, batch.index, jnp.full(BATCH, jnp.nan)))
    replay = fbuf.Replay(buffer, fbuf.datasets._open.example(pieces.SCHEMA), 0)
    batch = replay.sample(BATCH)
    replay = fbuf.Replay(buffer, fbuf.datasets.open(made[0], view=buffer.view, sampler=buffer.sampler)[1], 0)
    same(batch, replay.sample(BATCH))
    replay.update_priority(batch.index, np.ones(BATCH))
    raises(TypeError, "expected a writer that accepts rows", replay.extend, rows)
