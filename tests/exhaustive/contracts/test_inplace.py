import random

import pytest

from tests.more.contracts.test_inplace import (
    check_method,
    check_vmapped,
    test_masks_and_priorities_are_in_place,  # noqa: F401
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


lanes = one_of(None)


WRITERS = [("jit", "topk", "uniform", "ser"), ("scan", "topk", "minimum", "seor")]
WRITERS += [("scan", "reservoir", "prioritized", "estu"), ("jit", "reservoir", "prioritized", "ser")]
VMAPPED = [("uniform", "transition", "ser", 3), ("uniform", "row", "se", 2, 2)]
test_checks = checks((inplace.check_writer, WRITERS), (check_method, ["add", "set"]), (check_vmapped, VMAPPED))
