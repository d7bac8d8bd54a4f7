"""Mixtures: every sampler, storage and target in every mode."""

from __future__ import annotations

import pytest

from tests.support.mixture import (
    MODES,
    SAMPLERS,
    check_in_place,
    check_sampler,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_hold_rows_of_each_buffer(sampler: str, mode: str) -> None:
    check_sampler(sampler, mode)


@pytest.mark.optimized
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampler", ["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"]
)
def test_steps_are_in_place(sampler: str, mode: str) -> None:
    check_in_place(sampler, mode)
