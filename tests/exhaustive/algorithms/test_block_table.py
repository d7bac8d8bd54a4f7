"""`fbuf._algorithms.block_table`: every hash, large tables, and loops in place."""

import itertools

import pytest

from tests.support import block_table
from tests.support.tables import checks

test_checks = checks(
    (
        block_table.check_sequences,
        [(digest, places, lot) for digest in block_table.DIGESTS for places, lot in [(64, block_table.SIZE), (160, 7)]],
    ),
    (block_table.check_load, itertools.product([4096, 65_504], block_table.CONTENTS)),
    (block_table.check_turnover, [(64, 16), (96, 64), (4096, 256)]),
    (block_table.check_rebuild, itertools.product(block_table.DIGESTS, [64, 1024])),
)


test_optimized_checks = pytest.mark.optimized(
    checks((block_table.check_in_place, [(False, None), (True, None), (False, 3), (True, 3)]))
)
