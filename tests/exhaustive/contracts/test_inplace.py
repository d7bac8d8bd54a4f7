"""Further cases of inplace: see `tests/contracts/test_inplace.py`."""

from __future__ import annotations

import random

import pytest

from tests.support.inplace import FORMS, SAMPLERS, VIEWS, buffer_of, orders

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("first", "esort")
def test_every_order_of_up_to_three_is_in_place(form: str, sampler: str, view: str, first: str) -> None:
    if sampler == "uniform" and first == "o":
        pytest.skip("Uniform has no priorities")
    chosen = [o for n in (1, 2, 3) for o in orders(n, sampler) if o[0] == first]
    chosen += random.Random(f"{first}{sampler}{view}{form}").sample([o for o in orders(4, sampler) if o[0] == first], 8)
    failed = []
    buffer = buffer_of(sampler, view)
    for order in chosen:
        try:
            FORMS[form](buffer, order)
        except AssertionError as error:
            failed.append(f"{order}: {error}")
    assert not failed
