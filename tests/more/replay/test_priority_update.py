"""Priorities that `Replay` sets with the next draw, for samplers that the quick tier leaves out."""

import pytest

from tests.support.priority_updates import compare


@pytest.mark.parametrize(("sampler", "lanes"), [("held", 2), ("ranked", None)])
def test_batches_and_states_are_those_of_setting_at_once(sampler: str, lanes: int | None) -> None:
    compare(sampler, lanes)
