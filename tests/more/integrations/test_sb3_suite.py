"""Stable-Baselines3's own tests, with its replay buffers and with ours. They need its source: FBUF_SB3=<a checkout>.

`git clone --branch v2.8.0 https://github.com/DLR-RM/stable-baselines3`; about ten minutes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("stable_baselines3")
FILES = ("buffers", "n_step_replay", "save_load", "her", "dict_env", "cnn", "run", "vec_normalize")
SOURCE = os.environ.get("FBUF_SB3", "")


def failures(name: str, *options: str) -> tuple[set[str], int]:
    """Return the cases of a file that fail, and how many pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--import-mode=importlib", "-p", "no:cacheprovider", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    where = Path(SOURCE) / "tests"
    done = subprocess.run(
        [*command, f"test_{name}.py"], cwd=where, env=environment, capture_output=True, text=True, timeout=3000
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)), int(passed[1])


@pytest.mark.skipif(not SOURCE, reason="FBUF_SB3 does not name a checkout of Stable-Baselines3")
@pytest.mark.parametrize("name", FILES)
def test_no_case_fails_that_passes_with_their_buffers(name: str) -> None:
    theirs, number = failures(name)
    ours, passed = failures(name, "-p", "tests.support.sb3_swapped")
    assert ours <= theirs and passed >= number, (sorted(ours - theirs), passed, number)
