"""Invariant 2: a donated step costs O(rows in hand), whatever the order of verbs; what `assert_inplace` says if not."""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.testing import assert_inplace
from tests.support import inplace
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.trees import row_with

pytestmark = pytest.mark.in_place

# The other samplers are in tests/samplers and tier `more`, which has more orders; all are in tier `exhaustive`.
QUICK = [
    ("scan", "uniform", "row", "se"),
    ("scan", "prioritized", "transition", "esu"),
    ("scan", "everything", "row", "estu"),  # `t` reads the largest priority, which comes from a tree
    ("scan", "ranked", "row", "estu"),
]
test_samplers_are_in_place = checks((inplace.check_order, QUICK))


@pytest.fixture
def no_pin(monkeypatch):
    """Replace `order_after_reads` by the identity. Return a capacity that no other test uses, so that nothing is cached."""
    from fbuf._core import control_flow

    real, found = control_flow.order_after_reads, 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fbuf" and getattr(module, "order_after_reads", None) is real:
            monkeypatch.setattr(module, "order_after_reads", lambda token, reads: (token, reads))
            found += 1
    assert found >= 2, "no module uses order_after_reads"
    return inplace.CAPACITY + 2 * inplace.LANES


def test_control_without_pin_leaves_are_copied(no_pin):
    with pytest.raises(AssertionError, match="temporary bytes"):
        inplace.in_scan(inplace.buffer_of("prioritized", "row", capacity=no_pin), "soe")


@pytest.mark.parametrize("form", ["jit", "scan"])
def test_control_a_dropped_state_copies(form):
    buffer = inplace.buffer_of("uniform", "row")

    def step(state, given, carried):
        drawn, batch = buffer.sample(state, given["key"], inplace.BATCH)
        return buffer.extend(drawn if carried else state, given["rows"]), batch

    def check(carried):
        state = jax.eval_shape(buffer.init, inplace.ROW)
        if form == "jit":
            assert_inplace(functools.partial(step, carried=carried), state, inplace.inputs())
        else:
            scanned = functools.partial(lax.scan, functools.partial(step, carried=carried))
            assert_inplace(scanned, state, inplace.inputs((inplace.STEPS,)))

    with pytest.raises(AssertionError, match=r"Carry the state that each method returns \(also `sample`\) to the next"):
        check(carried=False)
    check(carried=True)


@pytest.mark.parametrize("storage", ["Device", "Deduplicated", "Compressed"])
def test_a_step_may_use_its_batch_and_not_return_it(storage):
    keys = {} if storage == "Device" else {"keys": ("obs",)}
    settings = {"storage": getattr(fbuf.storages, storage)(**keys), "sampler": fbuf.samplers.Prioritized()}
    buffer = fbuf.Buffer(3_000, view=inplace.VIEWS["transition"], **settings)
    row = row_with(np.zeros((84, 84), np.uint8))
    rows = jax.tree.map(lambda leaf: jnp.zeros((2, *leaf.shape), leaf.dtype), row)

    def step(state, key):
        state, batch = buffer.sample(buffer.extend(state, rows), key, 32)
        value = batch.data["obs"].astype(jnp.float32).mean(axis=(1, 2, 3))
        return buffer.update_priority(state, batch.index, value)

    memory = assert_inplace(step, buffer.init(row), jax.random.key(0))
    assert memory.made < 1_000 and memory.read >= 32 * 7 * 84 * 84  # the rows of all windows


def test_control_a_result_that_reuses_nothing():
    with warnings.catch_warnings(), pytest.raises(AssertionError, match="bytes are not reused"):
        warnings.simplefilter("ignore")  # some releases of JAX say so themselves
        assert_inplace(lambda x: x.astype(jnp.int8), inplace.shape((inplace.CAPACITY,), jnp.float32), bound=1024)


BUFFER = fbuf.Buffer(100_000)
STATE = jax.eval_shape(lambda: BUFFER.init(jnp.zeros(8)))
ROWS = jax.ShapeDtypeStruct((32, 8), jnp.float32)


class Agent:
    @functools.partial(jax.jit, static_argnums=0)
    def act(self, state, rows):
        return BUFFER.extend(state, rows)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def learn(self, state, key):
        return BUFFER.sample(state, key, 32)[0]


def test_a_function_jitted_without_donation_fails():
    raises(AssertionError, r"jitted without donation, so", lambda: assert_inplace(jax.jit(BUFFER.extend), STATE, ROWS))
    draw = jax.jit(lambda state, key: BUFFER.sample(state, key, 32))
    raises(AssertionError, r"without donation.*jax.jit\(step", lambda: assert_inplace(draw, STATE, jax.random.key(0)))
    small = fbuf.Buffer(4)
    raises(AssertionError, "without donation", lambda: assert_inplace(jax.jit(small.add), small.init(0.0), 1.0))
    with pytest.raises(AssertionError, match=r"without donation.*donate_argnums=1\)"):
        assert_inplace(functools.partial(jax.jit(fbuf.Buffer.extend, static_argnums=0), BUFFER), STATE, ROWS)
    raises(AssertionError, r"without donation.*donate_argnums=1\)", lambda: assert_inplace(Agent().act, STATE, ROWS))


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


def test_a_donated_argument_does_not_raise_the_limit():
    reverse = jax.jit(lambda step, rows: (step + 1, rows[::-1]), donate_argnums=(0, 1))
    raises(AssertionError, "temporary bytes", lambda: assert_inplace(reverse, jnp.zeros(4), jnp.zeros((100_000, 8))))
