"""Empty samples of the other samplers and of rows: see `tests/contracts/test_errors.py`."""

from typing import Any

import pytest

from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.views import Row, Transition
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted  # noqa: F401


@pytest.fixture(
    params=[
        Uniform(),
        Prioritized(),
        Prioritized(normalize=None, stratified=False),
        Prioritized(replace=False),
        Prioritized(replace=False, normalize="buffer"),
        Prioritized(uniform=0.5, largest="held"),
        Ranked(uniform=0.5, normalize="buffer"),
    ],
    ids=str,
)
def sampler(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=[Row(), Transition(n_step=2, stack=2)], ids=str)
def view(request: pytest.FixtureRequest) -> Any:
    return request.param
