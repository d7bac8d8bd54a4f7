"""Hostile checkpoints: many mutations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.hostile_manifests import any_values, mutated_manifests


@given(st.data())
@settings(max_examples=3000)
def test_any_values_in_any_place(data: st.DataObject) -> None:
    any_values(data)


@pytest.mark.parametrize("seed", range(1, 11))
def test_mutated_manifests(seed: int) -> None:
    mutated_manifests(10_000, seed)
