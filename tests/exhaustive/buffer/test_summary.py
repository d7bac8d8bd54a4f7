"""`Buffer.summary` of every storage with every sampler, view and writer."""

import itertools

from tests.support import combinations as parts
from tests.support.summary import check_all, check_unordered
from tests.support.tables import checks

COMBINATIONS = [
    case for case in itertools.product(parts.STORAGES, parts.SAMPLERS, parts.VIEWS) if case[1:] not in parts.REFUSED
]
test_checks = checks(
    (check_all, COMBINATIONS), (check_unordered, itertools.product(parts.UNORDERED_STORAGES, parts.UNORDERED_WRITERS))
)
