"""`Buffer(prefetch=1)`: every storage, sampler, view and form; in place."""

from __future__ import annotations

import itertools

import pytest

from tests.support.prefetch import CHECKS, SAMPLERS, VIEWS, check_batches, check_in_place

STORAGES = ("device", "deduplicated", "host", "compressed")


@pytest.mark.parametrize(
    ("sampler", "view", "storage", "form"),
    list(itertools.product(SAMPLERS, VIEWS, STORAGES, ("eager", "jit", "donated", "scan"))),
)
def test_batches_are_those_of_the_step_before(sampler: str, view: str, storage: str, form: str) -> None:
    check_batches(storage, sampler, view, form)


@pytest.mark.parametrize("check", range(len(CHECKS)))
def test_a_pending_batch_survives_in_deduplicated(check: int) -> None:
    CHECKS[check]("deduplicated")


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("storage", "sampler", "view", "order"),
    [
        ("device", "prioritized", "transition", "sesu"),
        ("deduplicated", "epoch", "sequence", "esr"),
        ("device", "consume", "row", "esr"),
        ("device", "uniform", "transition", "se"),
        ("compressed", "prioritized", "transition", "sesu"),
    ],
)
def test_a_donated_step_copies_nothing(storage: str, sampler: str, view: str, order: str) -> None:
    check_in_place(storage, sampler, view, order)
