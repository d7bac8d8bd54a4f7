"""Further cases of `python -m fbuf datasets`: see `tests/cli/test_datasets_command.py`."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.more


def test_a_closed_pipe_is_not_a_traceback():
    command = [sys.executable, "-m", "fbuf", "datasets", "list", "--available"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
