"""The oldest releases that `pyproject.toml` allows give the same batches; they are installed into a folder for this."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.exhaustive

# By extra: the module, its packages, and what its old releases import besides.
LIBRARIES = {
    "sb3": ("stable_baselines3", ["stable-baselines3"], ["pandas"]),
    "torchrl": ("torchrl", ["torchrl", "tensordict"], []),
}


@pytest.mark.parametrize("extra", LIBRARIES)
def test_the_oldest_release(extra: str, tmp_path: Path) -> None:
    module, packages, further = LIBRARIES[extra]
    pytest.importorskip(module)
    pinned = []
    for package in packages:
        found = re.search(rf'"{package}>=([\d.]+)[,"]', (ROOT / "pyproject.toml").read_text())
        assert found
        pinned.append(f"{package}=={found[1]}" + ".0" * (2 - found[1].count(".")))
    # Without dependencies, which are installed.
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    done = subprocess.run([*command, *pinned, *further], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{pinned} could not be installed: {done.stderr.strip().splitlines()[-1]}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--tier", "more", f"tests/integrations/test_{extra}.py"]
    tests = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert tests.returncode == 0 and " passed" in tests.stdout, tests.stdout[-3000:]
    code = f"import {module}; print({module}.__version__)"
    seen = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert seen.stdout.strip().splitlines()[-1] == pinned[0].partition("==")[2]
