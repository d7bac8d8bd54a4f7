"""Checkpoints survive faults: many seeds of random kills, power failures, damage and sequences; and hostile manifests."""

import pytest

from tests.support.checkpoint_faults import any_sequence, damaged_outcomes, flips, lengths, power_failures
from tests.support.hostile_manifests import mutated_manifests
from tests.support.tables import checks

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("seed", range(1, 7))
def test_power_failures_leave_the_old_or_the_new_save(seed):
    assert power_failures(each=12, seed=seed) > 800


@pytest.mark.parametrize("change", [flips, lengths])
def test_damage_of_two_generations_loads_a_whole_save_or_is_an_error(change):
    seen = damaged_outcomes(2, change)
    assert {k for k, _ in seen} == {0, 1, None} and len(seen) > 1500
    assert {k for k, data in seen if not data} == {0, 1}  # manifests are not shared


test_checks = checks((any_sequence, [1000]), (mutated_manifests, [(10_000, seed) for seed in range(1, 11)]))
