"""Checkpoints: every storage with every sampler, capacities, and many kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from fbuf.storages import Compressed
from tests.support import combinations
from tests.support.checkpoint import (
    check_every_number_of_rows,
    check_goes_on,
    check_grown,
    check_killed,
    check_old_state,
    check_other_buffer,
    check_resize,
)
from tests.support.checkpoint_saving import check_mangled_meta

VIEWS = ("Row", "Transition", "Episode", "Hindsight", "Sequence('mask')")
PAIRS = [  # each storage with each sampler twice, with another view and with and without prefetch
    (storage, sampler, VIEWS[(i + j + k) % len(VIEWS)], (j + k) % 2)
    for i, storage in enumerate(combinations.STORAGES)
    for j, sampler in enumerate(combinations.SAMPLERS)
    for k in (0, 1)
]
CASES = [
    (storage, sampler, VIEWS[(i + j) % len(VIEWS)], capacity, 9 if (i + j) % 3 else 5)
    for i, storage in enumerate(("Device", "Compressed", "Deduplicated", "Memmap", "Ragged"))
    for j, sampler in enumerate(combinations.SAMPLERS)
    for capacity in (16, 60)
]
# `Prioritized(replace=False)` draws by the capacity, and so other rows before the save.
GROWN = [s for s in combinations.SAMPLERS if s not in ("Prioritized(on='host')", "Prioritized(replace=False)")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_batches_go_on_bit_for_bit(pair: tuple[str, str, str, int], tmp_path: Path) -> None:
    check_goes_on(pair, 40, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_newest_rows_stay(case: tuple[str, str, str, int, int], tmp_path: Path) -> None:
    check_resize(case, tmp_path)


@pytest.mark.parametrize("view", ["Row", "Transition", "Episode", "Hindsight"])
@pytest.mark.parametrize("sampler", GROWN)
def test_a_grown_buffer_draws_the_batches_of_a_larger_one(sampler: str, view: str, tmp_path: Path) -> None:
    check_grown(sampler, view, tmp_path)


@pytest.mark.parametrize("storage", ["Device", "Deduplicated"])
def test_an_old_state_is_saved_as_it_was(storage: str, tmp_path: Path) -> None:
    check_old_state(storage, tmp_path)


def test_every_number_of_rows(tmp_path: Path) -> None:
    check_every_number_of_rows(Compressed(keys=("t",)), tmp_path)


def test_another_storage(tmp_path: Path) -> None:
    check_other_buffer("Deduplicated", tmp_path)


@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("storage", combinations.STORAGES)
def test_a_kill_leaves_the_old_or_the_new_save(storage: str, seed: int, tmp_path: Path) -> None:
    check_killed(storage, seed, tmp_path)


@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("name", ["device", "compressed"])
def test_mangled_metadata_is_refused(name: str, seed: int, tmp_path: Path) -> None:
    check_mangled_meta(name, seed, tmp_path)
