"""Faults with more storages and samplers."""

import sys

import pytest
from hypothesis import given

from fbuf.samplers import Consume, Epoch, Prioritized, Ranked
from tests.support import faults
from tests.support.tables import checks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_memory_during_extend():
    faults.check_no_memory("compressed")


@pytest.mark.parametrize(("verb", "donated"), [("write", False), ("read", False), ("read", True)])
def test_a_callback_that_raises_at_any_call(verb, donated, monkeypatch):
    faults.check_raising(verb, donated, monkeypatch)


@given(**faults.PRIORITIES)
def test_any_priorities_leave_a_buffer_that_draws(errors, alpha):
    faults.check_priorities(Ranked(), errors, alpha)


@pytest.mark.parametrize("sampler", [Consume(2), Prioritized(on="host")], ids=repr)
def test_a_key_used_twice_is_found(sampler):
    faults.check_key_reuse(sampler, prefetch=1)


test_checks = checks((faults.check_many_keys, [Epoch()]))
