"""Hostile checkpoints: many mutations, and fuzzing guided by coverage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files_hostile import any_values, mutated_manifests

ROOT = Path(__file__).resolve().parents[2]


@given(st.data())
@settings(max_examples=3000)
def test_any_values_in_any_place(data: st.DataObject) -> None:
    any_values(data)


@pytest.mark.parametrize("seed", range(1, 11))
def test_mutated_manifests(seed: int) -> None:
    mutated_manifests(10_000, seed)


def test_fuzzing_guided_by_coverage() -> None:
    pytest.importorskip("atheris")
    runs, environment = 1_000_000, os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.support.files_fuzz", f"-runs={runs}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and f"Done {runs} runs" in done.stderr, done.stderr[-3000:]
