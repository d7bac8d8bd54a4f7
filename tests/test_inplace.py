"""Invariant 2: a donated step costs O(rows in hand), whatever the order of verbs.

The proof is the temporary memory of the compiled program (`fbuf.testing.assert_inplace`), not the address of a result:
XLA may copy a leaf out and back to where it was. Nothing large is ever allocated here, because programs are compiled for
shapes. The capacity is such that the smallest leaf that grows with it (a byte a row) exceeds the bound, so a single
copied leaf fails; `state_of` checks that. Negative controls show that the checks can fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.testing import Memory, assert_inplace, measure

LANES, ROWS, BATCH, STEPS = 2, 3, 8, 5
CAPACITY = 400_000
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")

VERBS = "esuort"  # extend, sample, update of the last batch, update from elsewhere, update_rows, stats
ROW = {
    "obs": jax.ShapeDtypeStruct((4, 3), jnp.uint8),
    "action": jax.ShapeDtypeStruct((), jnp.int32),
    "reward": jax.ShapeDtypeStruct((), jnp.float32),
    "terminated": jax.ShapeDtypeStruct((), jnp.bool_),
    "truncated": jax.ShapeDtypeStruct((), jnp.bool_),
}
SAMPLERS = {
    "uniform": fbuf.samplers.Uniform(),
    "prioritized": fbuf.samplers.Prioritized(),
    "minimum": fbuf.samplers.Prioritized(normalize="buffer", stratified=False),
    "distinct": fbuf.samplers.Prioritized(replace=False, normalize="buffer"),
    "everything": fbuf.samplers.Prioritized(normalize="buffer", largest="held", uniform=0.1),
    "ranked": fbuf.samplers.Ranked(largest="held", uniform=0.1),
}
VIEWS = {
    "row": fbuf.views.Row(),
    "transition": fbuf.views.Transition(n_step=3, stack=4),
}


def shape(leading: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leading, dtype)


def leading(tree: Any, *axes: int) -> Any:
    return jax.tree.map(lambda x: shape((*axes, *x.shape), x.dtype), tree)


DEDUPLICATED = fbuf.storages.Deduplicated(keys=("obs",), blocks=2**19)


def buffer_of(
    sampler: str, view: str, capacity: int = CAPACITY, lanes: int | None = LANES, storage: Any = None
) -> fbuf.Buffer:
    storage = storage or fbuf.storages.Device()
    return fbuf.Buffer(
        capacity=capacity,
        storage=storage,
        sampler=SAMPLERS[sampler],
        view=VIEWS[view],
        lanes=lanes,
    )


def inputs(axes: tuple[int, ...] = ()) -> dict[str, Any]:
    """What one step takes besides the state."""
    return {
        "rows": leading(ROW, *axes, ROWS, LANES),
        "key": shape((*axes, 2), jnp.uint32),
        "error": shape((*axes, BATCH), jnp.float32),
        "index": fbuf.Index(shape((*axes, BATCH), jnp.int32), shape((*axes, BATCH), jnp.uint32)),
        "reward": shape((*axes, BATCH), jnp.float32),
    }


def step_of(buffer: fbuf.Buffer, order: str) -> Any:
    """`(state, inputs) -> (state, results)`: the verbs of `order`, one after another."""

    def step(state: Any, given: Any) -> Any:
        index, out = given["index"], []
        for verb in order:
            if verb == "e":
                state = buffer.extend(state, given["rows"])
            elif verb == "s":
                state, batch = buffer.sample(state, given["key"], BATCH)
                index = batch.index
                out.append(batch)
            elif verb == "u":
                state = buffer.update_priority(state, index, given["error"])
            elif verb == "o":
                state = buffer.update_priority(state, given["index"], given["error"])
            elif verb == "r":
                state = buffer.update_rows(state, index, {"reward": given["reward"]})
            elif verb == "t":
                out.append(buffer.stats(state))
        return state, out

    return step


def state_of(buffer: fbuf.Buffer, bound: int) -> Any:
    """The shapes of a state; every leaf that grows with the capacity is larger than `bound`."""
    state = jax.eval_shape(buffer.init, ROW)
    for leaf in jax.tree.leaves(state):
        size = leaf.size * leaf.dtype.itemsize
        assert size < 4096 or size > bound, f"a copy of {leaf} would go unnoticed below {bound} bytes"
    return state


def in_jit(buffer: fbuf.Buffer, order: str) -> Memory:
    memory = assert_inplace(step_of(buffer, order), jax.eval_shape(buffer.init, ROW), inputs())
    state_of(buffer, memory.bound)
    return memory


def in_scan(buffer: fbuf.Buffer, order: str) -> Memory:
    step = step_of(buffer, order)

    def steps(state: Any, given: Any) -> Any:
        return lax.scan(step, state, given)

    memory = assert_inplace(steps, jax.eval_shape(buffer.init, ROW), inputs((STEPS,)))
    state_of(buffer, memory.bound)
    return memory


FORMS = {"jit": in_jit, "scan": in_scan}


def orders(length: int, sampler: str) -> list[str]:
    """Every order of `length` verbs that means something: `u` needs a batch, priorities need a prioritized sampler."""
    verbs = VERBS if sampler != "uniform" else VERBS.replace("u", "").replace("o", "")
    every = ("".join(o) for o in itertools.product(verbs, repeat=length))
    return [o for o in every if "u" not in o or "s" in o[: o.index("u")]]


def some(length: int, sampler: str, number: int) -> list[str]:
    """A fixed sample of orders, different for each length, the same on every machine."""
    return sorted(random.Random(f"{length}{sampler}").sample(orders(length, sampler), number))


# For the richest state (rows, tree, flags) every pair: a scan of "es" also orders the "e" of a turn after the "s" of the
# one before, so there one of each two is enough. Some for the others, and some longer ones.
DEFAULT = [
    *(("jit", "prioritized", "transition", o) for o in orders(2, "prioritized") if o[0] != o[1] and "t" not in o),
    *(("jit", "prioritized", "transition", o) for o in ("te", "st")),
    *(("scan", "prioritized", "transition", o) for o in orders(2, "prioritized") if o == "su" or o <= o[::-1]),
    *(("scan", "uniform", "row", o) for o in ("se", "sr", "te")),
    *(("scan", "uniform", "transition", o) for o in ("se", "er")),
    *(("scan", "prioritized", "row", o) for o in ("se", "oe")),
    *(("scan", "minimum", "transition", o) for o in ("so", "re")),
    *(("jit", "prioritized", "transition", o) for n in (3, 4) for o in some(n, "prioritized", 2)),
    *(("scan", "prioritized", "transition", o) for n in (3, 4) for o in some(n, "prioritized", 2)),
]


KIT = [
    ("jit", "everything", "row", "estu"),  # `t` reads the largest priority, which comes from a tree
    *(
        pytest.param(form, sampler, view, order, marks=pytest.mark.slow)
        for sampler in ("everything", "ranked", "distinct")
        for form, view, order in (
            ("scan", "row", "estu"),
            ("scan", "transition", "so"),
            ("jit", "transition", "stu"),
            ("jit", "row", "oe"),
            ("scan", "transition", "estu"),
        )
    ),
]


@pytest.mark.parametrize(("form", "sampler", "view", "order"), [*DEFAULT, *KIT])
def test_every_order_is_in_place(form: str, sampler: str, view: str, order: str) -> None:
    FORMS[form](buffer_of(sampler, view), order)


@pytest.mark.parametrize(
    ("form", "sampler", "view", "order"),
    [
        ("scan", "prioritized", "transition", "esu"),
        pytest.param("jit", "prioritized", "transition", "seor", marks=pytest.mark.slow),
        pytest.param("scan", "uniform", "row", "se", marks=pytest.mark.slow),
        pytest.param("jit", "uniform", "transition", "ter", marks=pytest.mark.slow),
    ],
)
def test_orders_are_in_place_with_blocks(form: str, sampler: str, view: str, order: str) -> None:
    FORMS[form](buffer_of(sampler, view, storage=DEDUPLICATED), order)


WRITERS = {"topk": fbuf.writers.TopK("reward"), "reservoir": fbuf.writers.Reservoir()}


@pytest.mark.parametrize(
    ("form", "writer", "sampler", "order"),
    [
        ("scan", "topk", "prioritized", "estu"),
        pytest.param("jit", "topk", "uniform", "ser", marks=pytest.mark.slow),
        pytest.param("scan", "topk", "minimum", "seor", marks=pytest.mark.slow),
        pytest.param("scan", "reservoir", "prioritized", "estu", marks=pytest.mark.slow),
        pytest.param("jit", "reservoir", "uniform", "ser", marks=pytest.mark.slow),
    ],
)
def test_orders_are_in_place_with_other_writers(form: str, writer: str, sampler: str, order: str) -> None:
    FORMS[form](dataclasses.replace(buffer_of(sampler, "row"), writer=WRITERS[writer], episode_end=()), order)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("first", "esort")
def test_every_order_of_up_to_four(form: str, sampler: str, view: str, first: str) -> None:
    """All of them with FBUF_EXHAUSTIVE=1 (hours); otherwise one of length four."""
    if sampler == "uniform" and first == "o":
        pytest.skip("Uniform has no priorities")
    chosen = [o for n in (1, 2, 3, 4) for o in orders(n, sampler) if o[0] == first]
    if not EXHAUSTIVE:
        chosen = [random.Random(f"{first}{sampler}{view}{form}").choice([o for o in chosen if len(o) == 4])]
    failed = []
    buffer = buffer_of(sampler, view)
    for order in chosen:
        try:
            FORMS[form](buffer, order)
        except AssertionError as error:
            failed.append(f"{order}: {error}")
    assert not failed


@pytest.mark.parametrize("lanes", [None, LANES])
def test_masks_and_priorities_are_in_place(lanes: int | None) -> None:
    buffer = buffer_of("prioritized", "transition", lanes=lanes)
    axes = (ROWS,) if lanes is None else (ROWS, lanes)

    def step(state: Any, rows: Any, mask: Any, priority: Any, key: Any) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        return buffer.extend(state, rows, mask=mask, priority=priority), batch

    memory = assert_inplace(
        step,
        jax.eval_shape(buffer.init, ROW),
        leading(ROW, *axes),
        shape(axes, jnp.bool_),
        shape(axes, jnp.float32),
        shape((2,), jnp.uint32),
    )
    state_of(buffer, memory.bound)


@pytest.mark.parametrize(
    "verb", ["add", "set", "last", "get", "rebuild", pytest.param("add, ranked", marks=pytest.mark.slow)]
)
def test_other_verbs_are_in_place(verb: str) -> None:
    """Verbs that give no state back come after the last write: nothing orders them before one."""
    buffer = buffer_of({"rebuild": "everything", "add, ranked": "ranked"}.get(verb, "prioritized"), "transition")
    state = jax.eval_shape(buffer.init, ROW)
    if verb == "rebuild":
        assert_inplace(lambda s, a: buffer.rebuild(buffer.set(s, alpha=a)), state, shape((), jnp.float32))
    elif verb.startswith("add"):
        assert_inplace(buffer.add, state, leading(ROW, LANES))
    elif verb == "set":
        assert_inplace(lambda s, a: buffer.set(s, alpha=a), state, shape((), jnp.float32))
    elif verb == "last":
        assert_inplace(lambda s, r: (s := buffer.extend(s, r), buffer.last(s, 2)), state, leading(ROW, ROWS, LANES))
    else:
        index = inputs()["index"]
        assert_inplace(
            lambda s, r, i: (s := buffer.extend(s, r), buffer.get(s, i)), state, leading(ROW, ROWS, LANES), index
        )


def test_more_rows_than_fit_are_in_place() -> None:
    buffer = buffer_of("uniform", "row", capacity=100_000)
    rows = leading(ROW, 60_000, LANES)  # a lane holds 50,000
    memory = measure(buffer.extend, jax.eval_shape(buffer.init, ROW), rows)
    assert memory.temporary < memory.given


# ------------------------------------------------------------------------------------------------- many at once


@pytest.mark.parametrize("order", ["seu", "sroe"])
def test_vmapped_states_are_in_place(order: str) -> None:
    buffer, copies = buffer_of("prioritized", "transition"), 3
    step = jax.vmap(step_of(buffer, order))
    state = leading(jax.eval_shape(buffer.init, ROW), copies)
    assert_inplace(step, state, inputs((copies,)), bound=copies * 64 * 1024)
    state_of(buffer, 64 * 1024)


def test_vmapped_uniform_states_are_in_place() -> None:
    buffer, copies = buffer_of("uniform", "transition"), 3
    state = leading(jax.eval_shape(buffer.init, ROW), copies)
    memory = assert_inplace(jax.vmap(step_of(buffer, "ser")), state, inputs((copies,)))
    state_of(buffer, memory.bound)


def test_states_vmapped_twice_are_in_place() -> None:
    buffer = buffer_of("uniform", "row")
    state = leading(jax.eval_shape(buffer.init, ROW), 2, 2)
    assert_inplace(jax.vmap(jax.vmap(step_of(buffer, "se"))), state, inputs((2, 2)))


def loss_of(weights: jax.Array, batch: fbuf.Sample) -> tuple[jax.Array, jax.Array]:
    """Squared error of a linear value of the frames, and the errors themselves."""
    frames = batch.data["obs"].astype(jnp.float32).reshape(batch.mask.shape[0], -1)
    error = frames @ jnp.resize(weights, (frames.shape[1],)) - batch.data["reward"]
    return jnp.mean(batch.weight * error**2), error


def rows_at(key: jax.Array) -> Any:
    """One made-up row a lane."""
    return {
        "obs": jax.random.bits(key, (1, LANES, 4, 3), jnp.uint8),
        "action": jnp.zeros((1, LANES), jnp.int32),
        "reward": jax.random.normal(key, (1, LANES), jnp.float32),
        "terminated": jax.random.uniform(key, (1, LANES), jnp.float32) < jnp.float32(0.1),
        "truncated": jnp.zeros((1, LANES), jnp.bool_),
    }


def trainer(buffer: fbuf.Buffer, steps: int) -> Any:
    """A whole run, `init` included, as one function of a key."""
    gradient = jax.value_and_grad(loss_of, has_aux=True)

    def learn(weights: jax.Array, state: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(state, key, BATCH)
        (_, error), slope = gradient(weights, batch)
        if buffer.sampler.prioritized:
            # Masked instead of lax.cond: an empty sample has weight 0, and its index is skipped.
            state = buffer.update_priority(state, batch.index, error)
        return weights - jnp.float32(1e-6) * slope, state

    def step(carry: Any, key: jax.Array) -> Any:
        weights, state = carry
        state = buffer.extend(state, rows_at(key))
        if buffer.sampler.prioritized:
            weights, state = learn(weights, state, key)
        else:
            weights, state = lax.cond(
                buffer.can_sample(state), learn, lambda weights, state, key: (weights, state), weights, state, key
            )
        return (weights, state), jnp.sum(weights)

    def run(key: jax.Array) -> Any:
        carry = jnp.zeros((48,), jnp.float32), buffer.init(ROW)
        return lax.scan(step, carry, jax.random.split(key, steps))

    return run


@pytest.mark.parametrize(
    ("sampler", "view", "seeds"),
    [
        ("uniform", "row", 4),
        ("prioritized", "transition", 4),
        pytest.param("uniform", "transition", 4, marks=pytest.mark.slow),
        pytest.param("prioritized", "row", 4, marks=pytest.mark.slow),
        pytest.param("uniform", "transition", None, marks=pytest.mark.slow),
        pytest.param("prioritized", "transition", None, marks=pytest.mark.slow),
    ],
)
def test_whole_trainers_are_in_place(sampler: str, view: str, seeds: int | None) -> None:
    """README's two recipes: with `Uniform` the state goes through `lax.cond`, with `Prioritized` nothing does."""
    buffer = buffer_of(sampler, view)
    run = trainer(buffer, 6)
    keys = shape((2,) if seeds is None else (seeds, 2), jnp.uint32)
    memory = measure(run if seeds is None else jax.vmap(run), keys, donate=())
    # The state is made inside and returned, so it is no temporary. With seeds, zeros that all of them begin with may be.
    least = 64 * 1024 if seeds is None else 2 * CAPACITY
    assert memory.temporary < least
    assert memory.made > least * 10
    for leaf in jax.tree.leaves(jax.eval_shape(buffer.init, ROW)):
        size = (seeds or 1) * leaf.size * leaf.dtype.itemsize
        assert size < 4096 or size > least, f"a copy of {leaf} would go unnoticed"


def test_vmapped_trainers_give_what_single_ones_give() -> None:
    buffer = buffer_of("uniform", "transition", capacity=64)
    run, keys = trainer(buffer, 40), jax.random.split(jax.random.key(3), 2)
    together, run = jax.jit(jax.vmap(run))(keys), jax.jit(run)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9), one, run(keys[i]))


# --------------------------------------------------------------------------------------------- negative controls


@pytest.fixture
def no_pin(monkeypatch: pytest.MonkeyPatch) -> int:
    """Replaces `pin` by the identity, and gives a capacity no other test uses: verbs traced so far stay cached."""
    from fbuf import _pin

    real, found = _pin.pin, 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fbuf" and getattr(module, "pin", None) is real:
            monkeypatch.setattr(module, "pin", lambda token, reads: (token, reads))
            found += 1
    assert found >= 2, "who uses pin?"
    return CAPACITY + 2 * LANES


@pytest.mark.parametrize(
    ("sampler", "view", "order"),
    [("uniform", "row", "se"), ("prioritized", "row", "soe"), ("uniform", "transition", "ses")],
)
@pytest.mark.parametrize("form", FORMS)
def test_control_without_pin_leaves_are_copied(no_pin: int, form: str, sampler: str, view: str, order: str) -> None:
    with pytest.raises(AssertionError, match="temporary bytes"):
        FORMS[form](buffer_of(sampler, view, capacity=no_pin), order)


@pytest.mark.parametrize("form", ["jit", "scan"])
def test_control_a_dropped_state_copies(form: str) -> None:
    buffer = buffer_of("uniform", "row")

    def step(state: Any, given: Any) -> Any:
        _, batch = buffer.sample(state, given["key"], BATCH)
        return buffer.extend(state, given["rows"]), batch

    state = jax.eval_shape(buffer.init, ROW)
    with pytest.raises(AssertionError, match="the state `sample` returned was dropped"):
        if form == "jit":
            assert_inplace(step, state, inputs())
        else:
            assert_inplace(lambda s, given: lax.scan(step, s, given), state, inputs((STEPS,)))


def test_control_a_result_that_reuses_nothing() -> None:
    """A step that casts its state cannot write it where it was."""
    with warnings.catch_warnings(), pytest.raises(AssertionError, match="donated bytes are not reused"):
        warnings.simplefilter("ignore")  # some releases of JAX say so themselves
        assert_inplace(lambda x: x.astype(jnp.int8), shape((CAPACITY,), jnp.float32), bound=1024)


# --------------------------------------------------------------------------------------------------------- eager


def filled(buffer: fbuf.Buffer) -> Any:
    state = buffer.init(ROW)
    for key in jax.random.split(jax.random.key(0), 6):
        state = buffer.extend(state, rows_at(key))
    return jax.block_until_ready(state)


def pointers(tree: Any) -> dict[str, int]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf.unsafe_buffer_pointer() for path, leaf in pairs if leaf.size}


def changed(before: Any, after: Any) -> list[str]:
    old, new = pointers(before), pointers(after)
    return sorted(name for name in old if new[name] != old[name])


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_eager_sample_copies_nothing(sampler: str, view: str) -> None:
    buffer = buffer_of(sampler, view, capacity=64)
    state = filled(buffer)
    after, _ = buffer.sample(state, jax.random.key(1), BATCH)
    assert changed(state, after) == [".counters", ".token"]


@pytest.mark.parametrize("sampler", ["prioritized", "minimum"])
def test_eager_update_priority_copies_no_rows(sampler: str) -> None:
    buffer = buffer_of(sampler, "transition", capacity=64)
    state, batch = buffer.sample(filled(buffer), jax.random.key(1), BATCH)
    after = buffer.update_priority(state, batch.index, jnp.ones((BATCH,), jnp.float32))
    assert not [name for name in changed(state, after) if name.startswith((".rows", ".ring", ".anchors"))]
    assert ".sampler.tree" in changed(state, after)


def test_eager_update_rows_copies_only_the_leaf_it_names() -> None:
    buffer = buffer_of("prioritized", "transition", capacity=64)
    state, batch = buffer.sample(filled(buffer), jax.random.key(1), BATCH)
    after = buffer.update_rows(state, batch.index, {"reward": jnp.zeros((BATCH,), jnp.float32)})
    assert [name for name in changed(state, after) if name.startswith(".rows")] == [".rows['reward']"]


def test_eager_clear_and_set_copy_no_rows() -> None:
    buffer = buffer_of("prioritized", "transition", capacity=64)
    state = filled(buffer)
    assert not [name for name in changed(state, buffer.clear(state)) if name.startswith(".rows")]
    assert changed(state, buffer.set(state, beta=0.5)) == [".sampler.beta"]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_donated_add_keeps_every_large_leaf_where_it_was(sampler: str, view: str) -> None:
    buffer = buffer_of(sampler, view, capacity=4096)
    state = filled(buffer)
    large = {n for n, leaf in zip(pointers(state), jax.tree.leaves(state), strict=False) if leaf.size >= 4096}
    before = {name: pointers(state)[name] for name in large}
    add = jax.jit(buffer.add, donate_argnums=0)
    for key in jax.random.split(jax.random.key(5), 3):
        state = add(state, jax.tree.map(lambda x: x[0], rows_at(key)))
    after = pointers(state)
    assert large
    assert {name: after[name] for name in large} == before
