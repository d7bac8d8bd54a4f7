import random

import jax
import numpy as np
import pytest

from fbuf.testing import assert_inplace
from tests.more.contracts.test_inplace import (
    test_masks_and_priorities_are_in_place,  # noqa: F401
    test_other_verbs_are_in_place,  # noqa: F401
    test_whole_trainers_are_in_place,  # noqa: F401
    trainer,  # noqa: F401
)
from tests.support import inplace
from tests.support.tables import checks, one_of

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("form", inplace.FORMS)
@pytest.mark.parametrize("view", inplace.VIEWS)
@pytest.mark.parametrize("sampler", inplace.SAMPLERS)
@pytest.mark.parametrize("first", "esort")
def test_every_order_of_up_to_three_is_in_place(form, sampler, view, first):
    if sampler == "uniform" and first == "o":
        pytest.skip("Uniform has no priorities")
    chosen = [o for n in (1, 2, 3) for o in inplace.orders(n, sampler) if o[0] == first]
    chosen += random.Random(f"{first}{sampler}{view}{form}").sample(
        [o for o in inplace.orders(4, sampler) if o[0] == first], 8
    )
    failed = []
    buffer = inplace.buffer_of(sampler, view)
    for order in chosen:
        try:
            inplace.FORMS[form](buffer, order)
        except AssertionError as error:
            failed.append(f"{order}: {error}")
    assert not failed


@pytest.mark.parametrize(
    ("form", "sampler", "order"), [("jit", "prioritized", "seor"), ("jit", "uniform", "ter"), ("jit", "ranked", "stu")]
)
def test_orders_are_in_place_with_blocks(form, sampler, order):
    inplace.FORMS[form](inplace.buffer_of(sampler, "transition", storage=inplace.DEDUPLICATED), order)


recipe = one_of(
    ("uniform", "row", 4),
    ("prioritized", "row", 4),
    ("prioritized", "transition", 4),
    ("uniform", "transition", None),
    ("prioritized", "transition", None),
)
lanes = one_of(None)
verb = one_of("add", "set")


def test_vmapped_uniform_states_are_in_place():
    buffer, copies = inplace.buffer_of("uniform", "transition"), 3
    state = inplace.leading(jax.eval_shape(buffer.init, inplace.ROW), copies)
    memory = assert_inplace(jax.vmap(inplace.step_of(buffer, "ser")), state, inplace.inputs((copies,)))
    inplace.state_of(buffer, memory.bound)


def test_vmapped_trainers_give_what_single_ones_give():
    buffer = inplace.buffer_of("uniform", "transition", capacity=64)
    run, keys = trainer(buffer, 40), jax.random.split(jax.random.key(3), 2)
    together, run = jax.jit(jax.vmap(run))(keys), jax.jit(run)
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-9), one, run(keys[i]))


def test_states_vmapped_twice_are_in_place():
    buffer = inplace.buffer_of("uniform", "row")
    state = inplace.leading(jax.eval_shape(buffer.init, inplace.ROW), 2, 2)
    assert_inplace(jax.vmap(jax.vmap(inplace.step_of(buffer, "se"))), state, inplace.inputs((2, 2)))


test_checks = checks(
    (
        inplace.check_writer,
        [
            ("jit", "topk", "uniform", "ser"),
            ("scan", "topk", "minimum", "seor"),
            ("scan", "reservoir", "prioritized", "estu"),
            ("jit", "reservoir", "uniform", "ser"),
            ("jit", "reservoir", "prioritized", "ser"),
        ],
    )
)
