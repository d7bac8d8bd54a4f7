import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fbuf
from fbuf.testing import assert_inplace, measure
from tests.support import inplace
from tests.support.tables import checks, one_of

pytestmark = [pytest.mark.more, pytest.mark.in_place]

# Each verb that reads, before each that writes, with the richest state (rows, tree, flags); all orders are exhaustive.
ORDERS = ("se", "so", "te", "re", *inplace.some(4, "prioritized", 1))
PAIRS = [("jit", "prioritized", "transition", order) for order in ORDERS]
PAIRS += [("scan", "prioritized", *rest) for rest in (("row", "se"), ("transition", "scesc"), ("ids", "sec"))]
PAIRS += [("scan", "uniform", "episode ids", "sec"), ("scan", "consume", "row", "ses")]
PAIRS += [("scan", "minimum", "row", "so"), ("scan", "distinct", "row", "estu")]
test_every_pair_of_methods_is_in_place = checks((inplace.check_order, PAIRS))


lanes = one_of(inplace.LANES)
test_orders_are_in_place_with_other_parts = checks(
    (inplace.check_blocks, [("scan", "prioritized", "esu")]),
    (inplace.check_writer, [("scan", "topk", "prioritized", "estu")]),
)


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
        "rebuild": (lambda s, a: buffer.rebuild(buffer.set(s, alpha=a)), inplace.shape((), jnp.float32)),
        "set": (lambda s, a: buffer.set(s, alpha=a), inplace.shape((), jnp.float32)),
        "add": (buffer.add, inplace.leading(inplace.ROW, inplace.LANES)),
        "last": (lambda s, rows: (s := buffer.extend(s, rows), buffer.last(s, 2)), given["rows"]),
        "get": (lambda s, rows, i: (s := buffer.extend(s, rows), buffer.get(s, i)), given["rows"], given["index"]),
    }[method]
    assert_inplace(call, jax.eval_shape(buffer.init, inplace.ROW), *more)


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


def test_convert_reads_only_what_ends_episodes():
    buffer = fbuf.Buffer(2000, storage=fbuf.storages.Host())
    other = dataclasses.replace(buffer, view=fbuf.views.Transition(n_step=2, stack=3, autoreset="same_step"))
    state = buffer.init(inplace.ROW | {"obs": jax.ShapeDtypeStruct((5000,), jnp.float32)})
    assert measure(lambda s: buffer.convert(other, s), state, donate=()).temporary < 2_000_000


test_checks = checks(
    (check_method, ["last", "get", ("rebuild", "everything"), ("add", "ranked")]),
    (check_vmapped, [("prioritized", "transition", "sroeu", 3)]),
)
