"""Steps of methods in any order, and the proof that a donated step copies nothing large."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from fbuf.testing import assert_inplace
from tests.support.trees import row_with

LANES, ROWS, BATCH, STEPS = 2, 3, 8, 5
CAPACITY = 400_000
VERBS = "esuort"  # extend, sample, update of the last batch, update from elsewhere, update_rows, stats
ROW = row_with(np.zeros((4, 3), np.uint8))
SAMPLERS = {
    "uniform": fbuf.samplers.Uniform(),
    "prioritized": fbuf.samplers.Prioritized(),
    "minimum": fbuf.samplers.Prioritized(normalize="buffer", stratified=False),
    "distinct": fbuf.samplers.Prioritized(replace=False, normalize="buffer"),
    "everything": fbuf.samplers.Prioritized(normalize="buffer", largest="held", uniform=0.1),
    "ranked": fbuf.samplers.Ranked(largest="held", uniform=0.1),
    "consume": fbuf.samplers.Consume(2),
    "epoch": fbuf.samplers.Epoch(),
    "staleness": fbuf.samplers.Staleness(4),
}
NO_PRIORITIES = ("uniform", "consume", "epoch", "staleness")
DEDUPLICATED = fbuf.storages.Deduplicated(keys=("obs",), blocks=2**19)
WRITERS = {"topk": fbuf.writers.TopK("reward"), "reservoir": fbuf.writers.Reservoir()}
VIEWS = {
    "row": fbuf.views.Row(),
    "transition": fbuf.views.Transition(n_step=3, stack=4, autoreset="same_step"),
    "ids": fbuf.views.Transition(n_step=3, stack=4, autoreset="next_step", episode="action"),
    "episode ids": fbuf.views.Episode(5, autoreset="next_step", episode="action"),
}


def shape(leading, dtype):
    return jax.ShapeDtypeStruct(leading, dtype)


def leading(tree, *axes):
    return jax.tree.map(lambda x: shape((*axes, *x.shape), x.dtype), tree)


def buffer_of(sampler, view, capacity=CAPACITY, lanes=LANES, **settings):
    return fbuf.Buffer(capacity, sampler=SAMPLERS[sampler], view=VIEWS[view], lanes=lanes, **settings)


def inputs(axes=(), row=ROW, lanes=LANES, batch=BATCH):
    return {
        "rows": leading(row, *axes, ROWS, *(() if lanes is None else (lanes,))),
        "key": shape((*axes, 2), jnp.uint32),
        "error": shape((*axes, batch), jnp.float32),
        "index": fbuf.Index(shape((*axes, batch), jnp.int32), shape((*axes, batch), jnp.uint32)),
        "reward": shape((*axes, batch), jnp.float32),
    }


def step_of(buffer, order, batch=BATCH):
    """Return `(state, inputs) -> (state, results)`: the methods of `order`, one after another."""

    def step(state, given):
        index, out = given["index"], []
        for method in order:
            if method == "e":
                state = buffer.extend(state, given["rows"])
            elif method == "s":
                state, drawn = buffer.sample(state, given["key"], batch)
                index = drawn.index
                out.append(drawn)
            elif method == "u":
                state = buffer.update_priority(state, index, given["error"])
            elif method == "o":
                state = buffer.update_priority(state, given["index"], given["error"])
            elif method == "r":
                state = buffer.update_rows(state, index, {"reward": given["reward"]})
            elif method == "c":
                state = buffer.cut(state, given["error"][: buffer.lanes] > 0)
            elif method == "t":
                out.append(buffer.stats(state))
        return state, out

    return step


def assert_order(buffer, order, row, state=None, *, steps=0, batch=BATCH, bound=None):
    """Run the methods of `order` in one jit, or in a scan of so many steps: nothing large is copied."""
    step, state = step_of(buffer, order, batch), jax.eval_shape(buffer.init, row) if state is None else state
    if not steps:
        return assert_inplace(step, state, inputs((), row, buffer.lanes, batch))
    rows = inputs((steps,), row, buffer.lanes, batch)
    return assert_inplace(lambda s, x: lax.scan(step, s, x), state, rows, bound=bound)


def assert_draw_write_draw(buffer, row, state=None, *, jit=True):
    for steps in (0, 4) if jit else (4,):
        assert_order(buffer, "ses", row, state, steps=steps)


def state_of(buffer, bound):
    """The shapes of a state; every leaf that grows with the capacity is larger than `bound`."""
    state = jax.eval_shape(buffer.init, ROW)
    for leaf in jax.tree.leaves(state):
        size = leaf.size * leaf.dtype.itemsize
        assert size <= 4096 or size > bound, f"a copy of {leaf} would go unnoticed below {bound} bytes"
    return state


def in_jit(buffer, order):
    state_of(buffer, assert_order(buffer, order, ROW).bound)


def in_scan(buffer, order):
    bound = 96 * 1024  # two draws of `Ranked` take 82 KB, none of it a copy of a leaf
    assert_order(buffer, order, ROW, steps=STEPS, bound=bound)
    state_of(buffer, bound)


FORMS = {"jit": in_jit, "scan": in_scan}


def check_order(form, sampler, view, order, **parts):
    FORMS[form](buffer_of(sampler, view, **parts), order)


def check_blocks(form, sampler, order):
    check_order(form, sampler, "transition", order, storage=DEDUPLICATED)


def check_writer(form, writer, sampler, order):
    FORMS[form](dataclasses.replace(buffer_of(sampler, "row"), writer=WRITERS[writer], episode_end=()), order)


def orders(length, sampler):
    """Every order of `length` verbs that means something: `u` needs a batch, priorities need a prioritized sampler."""
    verbs = VERBS if sampler not in NO_PRIORITIES else VERBS.replace("u", "").replace("o", "")
    every = ("".join(o) for o in itertools.product(verbs, repeat=length))
    return [o for o in every if "u" not in o or "s" in o[: o.index("u")]]


def some(length, sampler, number):
    """A fixed sample of orders, different for each length, the same on every machine."""
    return sorted(random.Random(f"{length}{sampler}").sample(orders(length, sampler), number))
