"""Every program of `tests/programs` runs, as a user would run it; some check what they learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest

from tests.support.paths import ROOT
from tests.support.processes import devices, run_python

PROGRAMS = sorted((ROOT / "tests" / "programs").glob("*.py"))
SHARDED = ROOT / "tests" / "programs" / "sharded_dqn.py"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    if path == SHARDED:
        run_python(f"import runpy; runpy.run_path({str(path)!r})['main'](50)", **devices(8))
        return
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(path))["main"]()
