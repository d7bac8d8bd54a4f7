"""Every program of `tests/programs` runs, as a user would run it; some check what they learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest

from tests.support.paths import ROOT

# tests/more/ray runs those that need Ray.
PROGRAMS = sorted(p for p in (ROOT / "tests" / "programs").glob("*.py") if not p.stem.endswith("_ray"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(path))["main"]()
