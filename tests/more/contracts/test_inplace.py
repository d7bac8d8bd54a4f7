import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fbuf
from fbuf.testing import assert_inplace, measure
from tests.support import inplace
from tests.support.tables import one_of

pytestmark = pytest.mark.optimized

# Each verb that reads, before each that writes, with the richest state (rows, tree, flags); all orders are in tests/exhaustive.
PAIRS = [
    *(("jit", "prioritized", "transition", o) for o in ("se", "so", "te", "re")),
    *(("jit", "prioritized", "transition", o) for o in inplace.some(4, "prioritized", 1)),
    ("scan", "prioritized", "row", "se"),
    ("scan", "prioritized", "transition", "scesc"),
    ("scan", "prioritized", "ids", "sec"),
    ("scan", "uniform", "episode ids", "sec"),
]


@pytest.mark.parametrize(("form", "sampler", "view", "order"), PAIRS)
def test_every_pair_of_methods_is_in_place(form, sampler, view, order):
    inplace.FORMS[form](inplace.buffer_of(sampler, view), order)


def test_orders_are_in_place_with_blocks():
    inplace.FORMS["scan"](inplace.buffer_of("prioritized", "transition", storage=inplace.DEDUPLICATED), "esu")


@pytest.mark.parametrize(("form", "writer", "order"), [("scan", "topk", "estu")])
def test_orders_are_in_place_with_other_writers(form, writer, order):
    inplace.check_writer(form, writer, "prioritized", order)


lanes = one_of(inplace.LANES)


def test_masks_and_priorities_are_in_place(lanes):
    buffer = inplace.buffer_of("prioritized", "transition", lanes=lanes)
    axes = (inplace.ROWS,) if lanes is None else (inplace.ROWS, lanes)

    def step(state, rows, mask, priority, key):
        state, batch = buffer.sample(state, key, inplace.BATCH)
        return buffer.extend(state, rows, mask=mask, priority=priority), batch

    memory = assert_inplace(
        step,
        jax.eval_shape(buffer.init, inplace.ROW),
        inplace.leading(inplace.ROW, *axes),
        inplace.shape(axes, jnp.bool_),
        inplace.shape(axes, jnp.float32),
        inplace.shape((2,), jnp.uint32),
    )
    inplace.state_of(buffer, memory.bound)


verb = one_of("last", "get", "rebuild", "add, ranked")


def test_other_verbs_are_in_place(verb):
    buffer = inplace.buffer_of(
        {"rebuild": "everything", "add, ranked": "ranked"}.get(verb, "prioritized"), "transition"
    )
    state = jax.eval_shape(buffer.init, inplace.ROW)
    if verb == "rebuild":
        assert_inplace(lambda s, a: buffer.rebuild(buffer.set(s, alpha=a)), state, inplace.shape((), jnp.float32))
    elif verb.startswith("add"):
        assert_inplace(buffer.add, state, inplace.leading(inplace.ROW, inplace.LANES))
    elif verb == "set":
        assert_inplace(lambda s, a: buffer.set(s, alpha=a), state, inplace.shape((), jnp.float32))
    elif verb == "last":
        assert_inplace(
            lambda s, r: (s := buffer.extend(s, r), buffer.last(s, 2)),
            state,
            inplace.leading(inplace.ROW, inplace.ROWS, inplace.LANES),
        )
    else:
        index = inplace.inputs()["index"]
        assert_inplace(
            lambda s, r, i: (s := buffer.extend(s, r), buffer.get(s, i)),
            state,
            inplace.leading(inplace.ROW, inplace.ROWS, inplace.LANES),
            index,
        )


def test_more_rows_than_fit_are_in_place():
    buffer = inplace.buffer_of("uniform", "row", capacity=100_000)
    rows = inplace.leading(inplace.ROW, 60_000, inplace.LANES)  # a lane holds 50,000
    memory = measure(buffer.extend, jax.eval_shape(buffer.init, inplace.ROW), rows)
    assert memory.temporary < memory.given


def test_vmapped_states_are_in_place():
    buffer, copies = inplace.buffer_of("prioritized", "transition"), 3
    state = inplace.leading(jax.eval_shape(buffer.init, inplace.ROW), copies)
    assert_inplace(
        jax.vmap(inplace.step_of(buffer, "sroeu")), state, inplace.inputs((copies,)), bound=copies * 64 * 1024
    )
    inplace.state_of(buffer, 64 * 1024)


def loss_of(weights, batch):
    frames = batch.data["obs"].astype(jnp.float32).reshape(batch.mask.shape[0], -1)
    error = frames @ jnp.resize(weights, (frames.shape[1],)) - batch.data["reward"]
    return jnp.mean(batch.weight * error**2), error


def trainer(buffer, steps):
    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def learn(weights, state, key):
        state, batch = buffer.sample(state, key, inplace.BATCH)
        (_, error), slope = gradient(weights, batch)
        if buffer.sampler.prioritized:
            # Masked instead of lax.cond: an empty sample has weight 0, and its index is skipped.
            state = buffer.update_priority(state, batch.index, error)
        return weights - jnp.float32(1e-6) * slope, state

    def step(carry, key):
        weights, state = carry
        state = buffer.extend(state, inplace.rows_at(key))
        if buffer.sampler.prioritized:
            weights, state = learn(weights, state, key)
        else:
            weights, state = lax.cond(
                buffer.can_sample(state), learn, lambda weights, state, key: (weights, state), weights, state, key
            )
        return (weights, state), jnp.sum(weights)

    def run(key):
        carry = jnp.zeros((48,), jnp.float32), buffer.init(inplace.ROW)
        return lax.scan(step, carry, jax.random.split(key, steps))

    return run


recipe = one_of(("uniform", "transition", 4))


def test_whole_trainers_are_in_place(recipe):
    """README's two recipes: with `Uniform` the state goes through `lax.cond`, with `Prioritized` nothing does."""
    sampler, view, seeds = recipe
    buffer = inplace.buffer_of(sampler, view)
    run = trainer(buffer, 6)
    keys = inplace.shape((2,) if seeds is None else (seeds, 2), jnp.uint32)
    memory = measure(run if seeds is None else jax.vmap(run), keys, donate=())
    # The state is made inside and returned, so it is no temporary. With seeds, zeros that all of them begin with may be.
    least = 64 * 1024 if seeds is None else 2 * inplace.CAPACITY
    assert memory.temporary < least
    assert memory.made > least * 10
    for leaf in jax.tree.leaves(jax.eval_shape(buffer.init, inplace.ROW)):
        size = (seeds or 1) * leaf.size * leaf.dtype.itemsize
        assert size < 4096 or size > least, f"a copy of {leaf} would go unnoticed"


def test_donated_add_keeps_every_large_leaf_where_it_was():
    buffer = inplace.buffer_of("prioritized", "transition", capacity=4096)
    state = inplace.filled(buffer)
    large = {n for n, leaf in zip(inplace.pointers(state), jax.tree.leaves(state), strict=False) if leaf.size >= 4096}
    before = {name: inplace.pointers(state)[name] for name in large}
    add = jax.jit(buffer.add, donate_argnums=0)
    for key in jax.random.split(jax.random.key(5), 3):
        state = add(state, jax.tree.map(lambda x: x[0], inplace.rows_at(key)))
    after = inplace.pointers(state)
    assert large and {name: after[name] for name in large} == before


def test_convert_reads_only_what_ends_episodes():
    buffer = fbuf.Buffer(2000, storage=fbuf.storages.Host())
    other = dataclasses.replace(buffer, view=fbuf.views.Transition(n_step=2, stack=3, autoreset="same_step"))
    state = buffer.init(inplace.ROW | {"obs": jax.ShapeDtypeStruct((5000,), jnp.float32)})
    assert measure(lambda s: buffer.convert(other, s), state, donate=()).temporary < 2_000_000
