"""`fbuf._algorithms.block_table`: every hash, large tables, and loops in place."""

import pytest

from tests.support import block_table


@pytest.mark.parametrize(("places", "lot"), [(64, block_table.SIZE), (160, 7)])
@pytest.mark.parametrize("digest", block_table.DIGESTS)
def test_any_sequence_of_calls(digest, places, lot):
    block_table.check_sequences(digest, places, lot)


@pytest.mark.parametrize("places", [4096, 65_504])
@pytest.mark.parametrize("content", block_table.CONTENTS)
def test_nothing_is_refused_before_every_place_is_taken(content, places):
    block_table.check_load(places, content)


@pytest.mark.parametrize(("places", "lot"), [(64, 16), (96, 64), (4096, 256)])
def test_nothing_is_refused_while_blocks_come_and_go(places, lot):
    block_table.check_turnover(places, lot)


@pytest.mark.optimized
@pytest.mark.parametrize(("loop", "tables"), [(False, None), (True, None), (False, 3), (True, 3)])
def test_cycles_are_in_place(loop, tables):
    block_table.check_in_place(loop, tables)


@pytest.mark.parametrize("places", [64, 1024])
@pytest.mark.parametrize("digest", block_table.DIGESTS)
def test_rebuilding_keeps_blocks_that_are_referred_to(digest, places):
    block_table.check_rebuild(digest, places)
