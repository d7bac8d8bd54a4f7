"""Keys that are used twice, with every sampler."""

import itertools

from fbuf.samplers import Epoch, Prioritized, Ranked
from tests.support.faults import CONSUMED, check_key_reuse, check_many_keys
from tests.support.tables import checks

test_checks = checks(
    (check_key_reuse, itertools.product([*CONSUMED, Epoch(), Prioritized(), Prioritized(on="host")], [0, 1])),
    (check_many_keys, [Prioritized(), Prioritized(replace=False), Ranked()]),
)
