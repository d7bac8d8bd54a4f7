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


def is_in_place(form, sampler, view, orders):
    failed = []
    buffer = inplace.buffer_of(sampler, view)
    for order in orders:
        try:
            inplace.FORMS[form](buffer, order)
        except AssertionError as error:
            failed.append(f"{order}: {error}")
    assert not failed


# Every sampler with every view; jit and scan alternate in both.
PAIRS = [
    (("jit", "scan")[(i + j) % 2], sampler, view)
    for i, sampler in enumerate(inplace.SAMPLERS)
    for j, view in enumerate(inplace.VIEWS)
]


@pytest.mark.parametrize(("form", "sampler", "view"), PAIRS)
@pytest.mark.parametrize("first", "esort")
def test_every_pair_and_some_longer_orders_are_in_place(form, sampler, view, first):
    if sampler == "uniform" and first == "o":
        pytest.skip("Uniform has no priorities")
    by_length = [[o for o in inplace.orders(n, sampler) if o[0] == first] for n in (1, 2, 3, 4)]
    longer = random.Random(f"{first}{sampler}{view}{form}").sample(by_length[2] + by_length[3], 4)
    is_in_place(form, sampler, view, [*by_length[0], *by_length[1], *longer])


THREE = inplace.orders(3, "everything")


@pytest.mark.parametrize("form", inplace.FORMS)
@pytest.mark.parametrize("first", sorted({order[:2] for order in THREE}))
def test_every_order_of_three_is_in_place(form, first):
    is_in_place(form, "everything", "transition", [order for order in THREE if order.startswith(first)])


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
