"""Keys that are used twice, with every sampler."""

import pytest

from fbuf.samplers import Epoch, Prioritized, Ranked
from tests.support.faults import CONSUMED, check_key_reuse, check_many_keys


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("sampler", [*CONSUMED, Epoch(), Prioritized(), Prioritized(on="host")], ids=repr)
def test_a_key_used_twice_is_found(sampler, prefetch):
    check_key_reuse(sampler, prefetch)


@pytest.mark.parametrize("sampler", [Prioritized(), Prioritized(replace=False), Ranked()], ids=repr)
def test_no_key_of_many_states_is_taken_for_one_used_twice(sampler):
    check_many_keys(sampler)
