"""The sum tree at every capacity, up to a million leaves, and 2^24 rows."""

# ruff: noqa: F401, F811

from __future__ import annotations

import pytest

from tests.support.sumtree import (
    check_every_row,
    check_inplace,
    check_many_updates,
    check_paths,
    check_rebuild,
    check_set,
    check_strata,
    check_zero_leaves,
)
from tests.test_sumtree import path

CAPACITIES = [1, 2, 7, 8, 9, 64, 65, 1000, 65_536, 1_000_003]
LARGEST = CAPACITIES[-1]


@pytest.mark.parametrize(
    ("capacity", "reduce"), [*((c, "sum") for c in CAPACITIES), *((c, r) for c in (1, 9, 1000) for r in ("min", "max"))]
)
def test_set_is_what_a_plain_array_does(path: str, capacity: int, reduce: str) -> None:
    check_set(capacity, reduce)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("reduce", ["sum", "min", "max"])
def test_rebuild_is_set_of_all(capacity: int, reduce: str) -> None:
    check_rebuild(capacity, reduce)


def test_parents_after_ten_million_updates() -> None:
    check_many_updates(256)


@pytest.mark.parametrize("capacity", [1, 8, 65, LARGEST])
def test_zero_leaves_are_never_drawn(path: str, capacity: int) -> None:
    check_zero_leaves(capacity)


@pytest.mark.parametrize("capacity", [2**18, 2**24])
def test_every_row_can_be_drawn(capacity: int) -> None:
    check_every_row(capacity)


@pytest.mark.parametrize("batch", [1, 300, 16_384])
def test_both_paths_draw_the_same(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_paths(LARGEST, batch, monkeypatch)


def test_strata_bound_the_count_of_every_block(path: str) -> None:
    check_strata(LARGEST)


@pytest.mark.optimized
@pytest.mark.parametrize("batch", [2, 4096])
def test_set_writes_in_place(path: str, batch: int) -> None:
    check_inplace(batch)
