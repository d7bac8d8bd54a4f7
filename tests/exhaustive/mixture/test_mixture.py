"""Mixtures: every sampler, storage and target in every mode."""

from __future__ import annotations

import pytest

from tests.more.mixture.test_mixture import test_eager_jitted_and_scanned_give_the_same  # noqa: F401
from tests.support.mixture import (
    MODES,
    SAMPLERS,
    check_in_place,
    check_sampler,
    check_weights,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_hold_rows_of_each_buffer(sampler: str, mode: str) -> None:
    check_sampler(sampler, mode)


@pytest.fixture(params=[mode for mode in MODES if mode != "annealed"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("mode", "target"), [("exact", "source"), ("random", "source"), ("all", "union")])
def test_weights_are_those_of_the_mixture(mode: str, target: str) -> None:
    check_weights(mode, target, 1.0)


@pytest.mark.optimized
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampler", ["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"]
)
def test_steps_are_in_place(sampler: str, mode: str) -> None:
    check_in_place(sampler, mode)
