"""Empty samples of the samplers that `tests/contracts/test_errors.py` leaves out."""

from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from tests.contracts.test_errors import test_an_empty_sample_is_masked_and_counted  # noqa: F401
from tests.support.tables import one_of

sampler = one_of(Uniform(over="episodes"), Epoch(), Consume(2), Prioritized(), Prioritized(on="host"), Staleness(4))
