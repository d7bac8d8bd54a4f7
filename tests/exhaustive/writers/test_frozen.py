"""Frozen buffers with every sampler and view."""

# ruff: noqa: F401, F811

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import pieces
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS
from tests.writers.test_frozen import check_batches, made, small_blocks

CASES = [(s, v) for s in SAMPLERS for v in VIEWS if (s, v) not in REFUSED]


@pytest.mark.parametrize(("sampler", "view"), CASES)
def test_the_batches_of_device(made: tuple[Path, pieces.Rows], sampler: str, view: str) -> None:
    check_batches(*made, sampler, view)
