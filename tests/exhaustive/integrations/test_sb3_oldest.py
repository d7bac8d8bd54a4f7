"""The oldest Stable-Baselines3 that `pyproject.toml` allows gives the same batches; it is installed into a folder for this."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytest.importorskip("stable_baselines3")


def test_the_oldest_release(tmp_path: Path) -> None:
    found = re.search(r'"stable-baselines3>=([\d.]+),', (ROOT / "pyproject.toml").read_text())
    assert found
    version = found[1] + ".0" * (2 - found[1].count("."))
    # Without dependencies, which are installed, but for pandas: old releases import it.
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*command, f"stable-baselines3=={version}", "pandas"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"stable-baselines3 {version} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    run = [sys.executable, *"-m pytest -q -n 0 -p no:cacheprovider tests/more/integrations/test_sb3.py".split()]
    tests = subprocess.run(
        run,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0 and " passed" in tests.stdout and "skipped" not in tests.stdout, tests.stdout[-3000:]
    code = "import stable_baselines3; print(stable_baselines3.__version__)"
    where = os.environ | {"PYTHONPATH": str(tmp_path)}
    seen = subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True)
    assert seen.stdout.strip() == version
