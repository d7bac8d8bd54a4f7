"""Plans of every view, sampler and storage."""

from __future__ import annotations

import pytest

from tests.test_plan import SAMPLERS, STORAGES, VIEWS, check_fixed


@pytest.mark.optimized
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("view", VIEWS)
def test_fixed_sizes_are_exact(view: str, sampler: str, storage: str) -> None:
    check_fixed(view, sampler, storage)
