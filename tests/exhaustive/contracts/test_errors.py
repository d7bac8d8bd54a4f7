"""Empty samples of the samplers that `tests/contracts/test_errors.py` leaves out."""

import pytest

from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted  # noqa: F401


@pytest.fixture(
    params=[Uniform(over="episodes"), Epoch(), Consume(2), Prioritized(), Prioritized(on="host"), Staleness(4)], ids=str
)
def sampler(request):
    return request.param
