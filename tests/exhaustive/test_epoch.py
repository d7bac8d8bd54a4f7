"""Every kind of epoch over every view; every order of verbs in place."""

from __future__ import annotations

import pytest

from fbuf.samplers import Epoch
from tests.support.epoch import Trial, buffer_of, check_inplace


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


@pytest.mark.optimized
@pytest.mark.parametrize(("view", "order"), [("row", "es"), ("row", "ses"), ("steps", "ses")])
def test_a_scan_copies_nothing(view, order):
    check_inplace(view, order)
