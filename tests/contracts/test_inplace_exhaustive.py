import itertools

import pytest

from tests.contracts.test_inplace_more import (
    check_method,
    check_vmapped,
    test_masks_and_priorities_are_in_place,  # noqa: F401
)
from tests.support import inplace
from tests.support.tables import checks, one_of, pairwise

pytestmark = [pytest.mark.exhaustive, pytest.mark.in_place]


def meaningless(form, sampler, view, order):
    return sampler in inplace.NO_PRIORITIES and not {"u", "o"}.isdisjoint(order)


PAIRS = pairwise(inplace.FORMS, inplace.SAMPLERS, inplace.VIEWS, inplace.orders(2, "everything"), refused=meaningless)
PARTS = zip(itertools.cycle(inplace.FORMS), itertools.product(inplace.SAMPLERS, inplace.VIEWS))
FOUR = [(form, sampler, view, inplace.some(4, sampler, 24)[i % 24]) for i, (form, (sampler, view)) in enumerate(PARTS)]
ORDERS = zip(itertools.cycle(inplace.FORMS), inplace.orders(3, "everything"))
THREE = [(form, "everything", "transition", order) for form, order in ORDERS]
test_orders_are_in_place = checks((inplace.check_order, PAIRS + THREE + FOUR))


lanes = one_of(None)
BLOCKS = [("jit", "prioritized", "seor"), ("jit", "uniform", "ter"), ("jit", "ranked", "stu")]
WRITERS = [("jit", "topk", "uniform", "ser"), ("scan", "topk", "minimum", "seor")]
WRITERS += [("scan", "reservoir", "prioritized", "estu"), ("jit", "reservoir", "prioritized", "ser")]
VMAPPED = [("uniform", "transition", "ser", 3), ("uniform", "row", "se", 2, 2)]
test_checks = checks(
    (inplace.check_blocks, BLOCKS),
    (inplace.check_writer, WRITERS),
    (check_method, ["add", "set"]),
    (check_vmapped, VMAPPED),
)
