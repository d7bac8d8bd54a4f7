"""flashbax's own tests on our functions. They are not in its wheel: FBUF_FLASHBAX names a checkout of its repository.

The sweeps, 720 cases of some seconds, run with FBUF_EXHAUSTIVE=1.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CHECKOUT = os.environ.get("FBUF_FLASHBAX", "")
DIFFERENT = ["prioritised_flat_buffer_test.py::test_adjust_priorities"]  # sets priorities of an empty draw


@pytest.mark.skipif(not CHECKOUT, reason="FBUF_FLASHBAX does not name a checkout of flashbax's repository")
def test_flashbaxs_own_tests_pass() -> None:
    folder = Path(CHECKOUT).resolve()
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "tests.support.flashbax_suite"]
    options += [f"--deselect=flashbax/buffers/{test}" for test in DIFFERENT]
    options += ["--ignore=flashbax/buffers/sum_tree_test.py"]  # of its tree, which is not replaced
    if os.environ.get("FBUF_EXHAUSTIVE", "0") in ("", "0"):
        options += ["-k", "not broken_trajectories"]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pytest", *options, "flashbax/buffers"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
