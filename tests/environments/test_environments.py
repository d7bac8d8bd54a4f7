"""Draws of the rows that ENVIRONMENTS.md stores are the bare steps of the real libraries, and the settings it warns of err.

`install.py` installs the libraries into the environment FBUF_ENVIRONMENTS; each is tried in a process of it.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.environments.install import LIBRARIES
from tests.support.paths import ROOT

FOLDER = Path(os.environ.get("FBUF_ENVIRONMENTS", "")).absolute()
INSTALLED = FOLDER / "installed"
if not INSTALLED.is_file():
    pytest.skip("FBUF_ENVIRONMENTS names no folder that install.py filled", allow_module_level=True)


@pytest.mark.parametrize("library", LIBRARIES)
def test_draws_are_bare_steps(library: str) -> None:
    if library not in INSTALLED.read_text().split():
        pytest.skip(f"{library} is not installed in {FOLDER.name}")
    command = [FOLDER / "bin" / "python", Path(__file__).with_name("libraries.py"), library]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    variables.pop("XLA_FLAGS", None)  # those of the tests' JAX; another release does not know them
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ": right (" in done.stdout
