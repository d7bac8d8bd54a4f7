"""`storages.Ragged`: any history of any lanes and sizes, and growth with every sampler and view."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Zstd
from fbuf.views import Episode, Row, Sequence, Transition
from tests.support.ragged import check_growth, check_history


@given(
    seed=st.integers(0, 2**32 - 1),
    lanes=st.sampled_from([None, 1, 3]),
    codec=st.sampled_from([None, Zstd(3)]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=6),
    columns=st.booleans(),
)
def test_rows_are_those_of_a_plain_list(seed: int, lanes: int | None, codec: Any, sizes: Any, columns: bool) -> None:
    check_history(seed, lanes, codec, sizes, columns, masked=False)


SAMPLERS = [
    Uniform(),
    Uniform(over="episodes"),
    Prioritized(),
    Prioritized(largest="held", uniform=0.2, normalize="buffer"),
    Epoch(),
    Consume(2),
    Staleness(4, unit=3),
    Ranked(uniform=0.2),
]
VIEWS = [Row(), Transition(observation="id", n_step=2), Sequence(3), Sequence(3, boundary="mask"), Episode(4)]


@pytest.mark.parametrize(("sampler", "view"), list(itertools.product(SAMPLERS, VIEWS)))
def test_a_grown_buffer_is_one_that_was_larger_from_the_start(sampler: Any, view: Any) -> None:
    check_growth(sampler, view)
