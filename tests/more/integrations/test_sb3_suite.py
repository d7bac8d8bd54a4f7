"""Stable-Baselines3's own tests, with its replay buffers and with ours. They need its source: FBUF_SB3=<a checkout>.

`git clone https://github.com/DLR-RM/stable-baselines3` at the tag of the installed version; some twenty minutes.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("stable_baselines3")
FILES = ("buffers", "n_step_replay", "save_load", "her", "dict_env", "cnn", "run", "vec_normalize")
SOURCE = os.environ.get("FBUF_SB3", "")


def failures(folder: Path, name: str, *options: str) -> tuple[set[str], int]:
    shutil.copy(Path(SOURCE) / "tests" / f"test_{name}.py", folder)  # out of a package that is called as ours
    run = [sys.executable, *"-m pytest -q -rfE --tb=no -p no:cacheprovider".split(), *options, f"test_{name}.py"]
    done = subprocess.run(
        run,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)), int(passed[1])


@pytest.mark.skipif(not SOURCE, reason="FBUF_SB3 does not name a checkout of Stable-Baselines3")
@pytest.mark.parametrize("name", FILES)
def test_no_case_fails_that_passes_with_their_buffers(name: str, tmp_path: Path) -> None:
    theirs, number = failures(tmp_path, name)
    ours, passed = failures(tmp_path, name, "-p", "tests.support.sb3_swapped")
    assert ours <= theirs and passed >= number, (sorted(ours - theirs), passed, number)
