"""`Buffer.summary` of every storage with every sampler, every view and every writer."""

import itertools

from tests.support import combinations as parts
from tests.support.summary import check_all, check_unordered
from tests.support.tables import checks, pairwise

COMBINATIONS = pairwise(
    parts.STORAGES, parts.SAMPLERS, parts.VIEWS, refused=lambda storage, *case: case in parts.REFUSED
)
test_checks = checks(
    (check_all, COMBINATIONS), (check_unordered, itertools.product(parts.UNORDERED_STORAGES, parts.UNORDERED_WRITERS))
)
