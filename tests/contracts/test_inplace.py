"""Invariant 2: a donated step costs O(rows in hand), whatever the order of verbs; what `assert_inplace` says if not."""

import dataclasses
import functools
import itertools
import math
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.testing import assert_inplace, measure
from tests.support import inplace
from tests.support.refusals import raises
from tests.support.tables import by_tier, checks, one_of, pairwise
from tests.support.trees import row_with

pytestmark = pytest.mark.in_place

# The other samplers are in tests/samplers and tier `more`, which has more orders; all are in tier `exhaustive`.
QUICK = [
    ("scan", "uniform", "row", "se"),
    ("scan", "prioritized", "transition", "esu"),
]
FURTHER = [
    ("scan", "everything", "row", "estu"),  # `t` reads the largest priority, which comes from a tree
    ("scan", "ranked", "row", "estu"),
]
test_samplers_are_in_place = checks((inplace.check_order, QUICK), more=[(inplace.check_order, FURTHER)])


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


@pytest.mark.more
def test_control_without_pin_leaves_are_copied(no_pin):
    with pytest.raises(AssertionError, match="temporary bytes"):
        inplace.in_scan(inplace.buffer_of("prioritized", "row", capacity=no_pin), "soe")


@pytest.mark.parametrize("form", by_tier("jit", more=["scan"]))
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


def test_a_step_that_trains_a_network_passes_with_its_own_bound():
    def step(state, weights):
        state, batch = BUFFER.sample(state, jax.random.key(0), 32)
        return state, jnp.sum(jnp.sort(jnp.cos(jnp.arange(100_000.0) * batch.weight[0]))) * weights

    raises(AssertionError, r"Unless the loss needs them \(then pass bound=\)", lambda: assert_inplace(step, STATE, 1.0))
    assert_inplace(step, STATE, 1.0, bound=2_000_000)


@pytest.mark.parametrize("storage", by_tier("Device", more=["Deduplicated", "Compressed"]))
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


# Each verb that reads, before each that writes, with the richest state (rows, tree, flags); all orders are exhaustive.
ORDERS = ("se", "so", "te", "re", *inplace.some(4, "prioritized", 1))
PAIRS = [("jit", "prioritized", "transition", order) for order in ORDERS]
PAIRS += [("scan", "prioritized", *rest) for rest in (("row", "se"), ("transition", "scesc"), ("ids", "sec"))]
PAIRS += [("scan", "uniform", "episode ids", "sec"), ("scan", "consume", "row", "ses")]
PAIRS += [("scan", "minimum", "row", "so"), ("scan", "distinct", "row", "estu")]
test_every_pair_of_methods_is_in_place = checks(more=[(inplace.check_order, PAIRS)])


test_orders_are_in_place_with_other_parts = checks(
    more=[
        (inplace.check_blocks, [("scan", "prioritized", "esu")]),
        (inplace.check_writer, [("scan", "topk", "prioritized", "estu")]),
    ]
)


lanes = one_of(inplace.LANES, exhaustive=[None])


@pytest.mark.more
def test_masks_and_priorities_are_in_place(lanes):
    buffer = inplace.buffer_of("prioritized", "transition", lanes=lanes)
    axes = (inplace.ROWS,) if lanes is None else (inplace.ROWS, lanes)

    def step(state, rows, mask, priority, key):
        state, batch = buffer.sample(state, key, inplace.BATCH)
        return buffer.extend(state, rows, mask=mask, priority=priority), batch

    given = [inplace.shape(axes, kind) for kind in (jnp.bool_, jnp.float32)]
    given = [inplace.leading(inplace.ROW, *axes), *given, inplace.shape((2,), jnp.uint32)]
    memory = assert_inplace(step, jax.eval_shape(buffer.init, inplace.ROW), *given)
    inplace.state_of(buffer, memory.bound)


def check_method(method, sampler="prioritized"):
    buffer, given = inplace.buffer_of(sampler, "transition"), inplace.inputs()
    call, *more = {
        "rebuild": (lambda s, a: buffer.set(s, alpha=a, rebuild=True), inplace.shape((), jnp.float32)),
        "set": (lambda s, a: buffer.set(s, alpha=a), inplace.shape((), jnp.float32)),
        "add": (buffer.add, inplace.leading(inplace.ROW, inplace.LANES)),
        "last": (lambda s, rows: (s := buffer.extend(s, rows), buffer.rows(s, last=2)), given["rows"]),
        "get": (lambda s, rows, i: (s := buffer.extend(s, rows), buffer.get(s, i)), given["rows"], given["index"]),
    }[method]
    assert_inplace(call, jax.eval_shape(buffer.init, inplace.ROW), *more)


@pytest.mark.more
def test_more_rows_than_fit_are_in_place():
    buffer = inplace.buffer_of("uniform", "row", capacity=100_000)
    rows = inplace.leading(inplace.ROW, 60_000, inplace.LANES)  # a lane holds 50,000
    memory = measure(buffer.extend, jax.eval_shape(buffer.init, inplace.ROW), rows)
    assert memory.temporary < memory.given


def check_vmapped(sampler, view, order, *copies):
    buffer = inplace.buffer_of(sampler, view)
    step, bound = inplace.step_of(buffer, order), 64 * 1024
    for _ in copies:
        step = jax.vmap(step)
    state = inplace.leading(inplace.state_of(buffer, bound), *copies)
    assert_inplace(step, state, inplace.inputs(copies), bound=math.prod(copies) * bound)


@pytest.mark.more
@pytest.mark.parametrize("vmapped", [False, True])
def test_a_conditional_step_is_in_place(vmapped):
    buffer, bound = inplace.buffer_of("uniform", "transition"), 96 * 1024
    learn = inplace.step_of(buffer, "s" if vmapped else "sr")  # a condition that is mapped over writes on both sides

    def step(state, given):
        state = buffer.extend(state, given["rows"])
        return lax.cond(buffer.can_sample(state), lambda s: learn(s, given)[0], lambda s: s, state), None

    def run(state, given):
        return lax.scan(step, state, given)

    state, given = inplace.state_of(buffer, bound), inplace.inputs((inplace.STEPS,))
    if vmapped:
        run, bound, state, given = jax.vmap(run), 2 * bound, inplace.leading(state, 2), inplace.leading(given, 2)
    assert_inplace(run, state, given, bound=bound)


@pytest.mark.more
def test_convert_reads_only_what_ends_episodes():
    buffer = fbuf.Buffer(2000, storage=fbuf.storages.Host())
    other = dataclasses.replace(buffer, view=fbuf.views.Transition(n_step=2, stack=3, autoreset="same_step"))
    state = buffer.init(inplace.ROW | {"obs": jax.ShapeDtypeStruct((5000,), jnp.float32)})
    assert measure(lambda s: buffer.convert(other, s), state, donate=()).temporary < 2_000_000


def meaningless(form, sampler, view, order):
    return sampler in inplace.NO_PRIORITIES and not {"u", "o"}.isdisjoint(order)


EVERY_PAIR = pairwise(
    inplace.FORMS, inplace.SAMPLERS, inplace.VIEWS, inplace.orders(2, "everything"), refused=meaningless
)
PARTS = zip(itertools.cycle(inplace.FORMS), itertools.product(inplace.SAMPLERS, inplace.VIEWS))
FOUR = [(form, sampler, view, inplace.some(4, sampler, 24)[i % 24]) for i, (form, (sampler, view)) in enumerate(PARTS)]
ORDERS_OF_THREE = zip(itertools.cycle(inplace.FORMS), inplace.orders(3, "everything"))
THREE = [(form, "everything", "transition", order) for form, order in ORDERS_OF_THREE]
test_orders_are_in_place = checks(exhaustive=[(inplace.check_order, EVERY_PAIR + THREE + FOUR)])


BLOCKS = [("jit", "prioritized", "seor"), ("jit", "uniform", "ter"), ("jit", "ranked", "stu")]
WRITERS = [("jit", "topk", "uniform", "ser"), ("scan", "topk", "minimum", "seor")]
WRITERS += [("scan", "reservoir", "prioritized", "estu"), ("jit", "reservoir", "prioritized", "ser")]
VMAPPED = [("uniform", "transition", "ser", 3), ("uniform", "row", "se", 2, 2)]


test_checks = checks(
    more=[
        (check_method, ["last", "get", ("rebuild", "everything"), ("add", "ranked")]),
        (check_vmapped, [("prioritized", "transition", "sroeu", 3)]),
    ],
    exhaustive=[
        (inplace.check_blocks, BLOCKS),
        (inplace.check_writer, WRITERS),
        (check_method, ["add", "set"]),
        (check_vmapped, VMAPPED),
    ],
)
