"""Writers with every storage and sampler, and in place."""

# ruff: noqa: F401, F811

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import fbuf
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.storages import DataSet
from fbuf.views import Sequence, Transition
from tests.support import scattered
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS
from tests.support.refusals import raises
from tests.support.scattered import EXAMPLE, make, rows_of
from tests.support.tables import checks, one_of
from tests.support.trees import same
from tests.writers import test_reservoir, test_topk
from tests.writers.test_frozen import BATCH, check_batches, device, made, opened, small_blocks
from tests.writers.test_scattered_more import test_an_old_state_reads_its_own_rows_or_says_that_they_expired
from tests.writers.test_topk import KINDS, PROGRAM, check_program, check_ways

pytestmark = pytest.mark.exhaustive

# Each sampler and each view, and not every pair of them, which storages on the device and the host have.
CASES = [case for case in zip(SAMPLERS, itertools.cycle(VIEWS)) if case not in REFUSED]


@pytest.mark.parametrize(("sampler", "view"), CASES)
def test_the_batches_of_device(made, sampler, view):
    check_batches(*made, sampler, view)


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


def test_a_hundred_thousand_rows_take_no_more_than_a_thousand():
    buffer = make("Compressed", "Anywhere", capacity=1000)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state, sizes = buffer.init(EXAMPLE), []
    for i in range(500):
        state = extend(state, rows_of(200 * i, 200))
        if i % 50 == 9:
            sizes.append(buffer.nbytes(state)["host"])
    assert max(sizes) < min(sizes) + 5 * 32 * 1024  # the arena lets four segments lie idle before it moves anything


storage = one_of("Host", "Compressed")


@pytest.mark.parametrize("kind", KINDS)
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    check_program(kind, program)


test_checks = checks((check_ways, [(600, 40)]), (test_reservoir.check_sets, [3]))
test_in_place_checks = pytest.mark.in_place(
    checks(
        (test_reservoir.check_inplace, [100]),
        (scattered.check_inplace, itertools.product(["Device", "Host", "Compressed"], ["Uniform", "Prioritized"])),
        (test_topk.check_inplace, ["jit", "vmap"]),
    )
)
